# SPDX-License-Identifier: Apache-2.0
"""Boxes that have no elements in common, and whether another one touches any of them.

A new box is one of the recent ones, which are all compared at once. When there are many, they are packed: sorted such
that neighbours lie close to each other, and put into groups, these into larger groups, and so on. What does not touch
the hull of a group is compared with nothing in it. A pack is rebuilt, with the recent boxes, when these are an eighth
of it, so that n boxes cost about n log n, in whichever order they come.

Hulls can be crossed without a box in them being touched: for boxes as long as the tensor among boxes of one element
some sqrt(n) groups are looked into, all in one go. The worst that was found are long boxes that pass between each other
in three directions: n of them cost about n^1.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.sync_service.protocol.frames import Box

__all__ = ["DisjointBoxes"]

_RECENT = 512
"""Boxes that are compared one by one before they are packed."""

_GROUP = 256
"""Boxes, or groups, in a group."""

_GROWTH = 8
"""How many times as large as what came after it a pack is at least."""

_Corners = NDArray[np.int64]
"""int64, (axes, boxes) or, in groups, (axes, groups, _GROUP)."""


class DisjointBoxes:
    """Boxes of one tensor, none of which overlaps another one."""

    def __init__(self, axes: int) -> None:
        """Begin without any.

        Args:
            axes: of the tensor.
        """
        self._low: _Corners = np.empty((axes, 4), dtype=np.int64)
        self._high = self._low.copy()
        self._recent = 0
        self._packs: list[_Pack] = []  # the largest first

    def touches(self, box: Box) -> bool:
        """Return whether a box has elements in common with one that is there."""
        low, high = _corners(box)
        recent = slice(0, self._recent)
        if _overlapping(self._low[:, recent], self._high[:, recent], low, high).any():
            return True
        return any(pack.touches(low, high) for pack in self._packs)

    def add(self, box: Box) -> None:
        """Take in a box that touches none."""
        if self._recent == self._low.shape[1]:
            if self._recent < _RECENT:
                self._low, self._high = (np.concatenate([each, each], axis=1) for each in (self._low, self._high))
            else:
                self._pack()
        self._low[:, self._recent : self._recent + 1], self._high[:, self._recent : self._recent + 1] = _corners(box)
        self._recent += 1

    def _pack(self) -> None:
        lows, highs, total = [self._low], [self._high], self._recent
        while self._packs and self._packs[-1].low.shape[1] < _GROWTH * total:
            pack = self._packs.pop()
            lows, highs, total = [*lows, pack.low], [*highs, pack.high], total + pack.low.shape[1]
        self._packs.append(_Pack.of(np.concatenate(lows, axis=1), np.concatenate(highs, axis=1)))
        self._recent = 0


@dataclass(frozen=True, kw_only=True)
class _Pack:
    """Boxes that do not become more."""

    low: _Corners
    """First elements."""

    high: _Corners
    """One past the last elements."""

    levels: list[tuple[_Corners, _Corners]]
    """(low, high) of the hulls of one group of groups, of the hulls in these, ..., of the boxes."""

    @classmethod
    def of(cls, low: _Corners, high: _Corners) -> _Pack:
        """Pack boxes."""
        order = _order(low + high)
        low, high = low[:, order], high[:, order]
        levels = [(_grouped(low, True), _grouped(high, False))]
        while levels[0][0].shape[1] > 1:
            lower, upper = levels[0]
            levels.insert(0, (_grouped(lower.min(axis=2), True), _grouped(upper.max(axis=2), False)))
        return cls(low=low, high=high, levels=levels)

    def touches(self, low: _Corners, high: _Corners) -> bool:
        """Return whether a box, given by its corners, has elements in common with one that is there."""
        groups = np.zeros(1, dtype=np.int64)
        for lower, upper in self.levels:
            found, place = np.nonzero(
                _overlapping(lower[:, groups], upper[:, groups], low[:, :, None], high[:, :, None])
            )
            if not found.size:
                return False
            groups = groups[found] * _GROUP + place
        return True


def _corners(box: Box) -> tuple[_Corners, _Corners]:
    """Return the first element of a box and what is one past its last one: int64, (axes, 1)."""
    low = np.array(box.start, dtype=np.int64).reshape(-1, 1)
    return low, low + np.array(box.shape, dtype=np.int64).reshape(-1, 1)


def _overlapping(lower: _Corners, upper: _Corners, low: _Corners, high: _Corners) -> NDArray[np.bool_]:
    """Return which of the boxes with the corners `lower` and `upper` overlap the one with `low` and `high`."""
    found: NDArray[np.bool_] = ((lower < high) & (upper > low)).all(axis=0)
    return found


def _grouped(corners: _Corners, is_low: bool) -> _Corners:
    """Return corners in groups, the last of which is filled up with boxes that overlap nothing."""
    axes, count = corners.shape
    limits = np.iinfo(np.int64)
    filling = np.full((axes, -count % _GROUP), limits.max if is_low else limits.min, dtype=np.int64)
    return np.concatenate([corners, filling], axis=1).reshape(axes, -1, _GROUP)


def _order(centres: _Corners) -> NDArray[np.int64]:
    """Return an order in which neighbours lie close to each other.

    Slabs along the first axis in which the centres differ are cut along the next one, and so on, such that what is left
    are the groups.
    """
    axes = [axis for axis in range(len(centres)) if centres[axis].min() != centres[axis].max()]
    count = centres.shape[1]
    order = np.arange(count)
    tile = np.zeros(count, dtype=np.int64)
    left = max(-(-count // _GROUP), 1)  # groups that a tile is to be cut into
    for place, axis in enumerate(axes):
        # Where centres are the same, the other axes decide.
        others = [centres[other][order] for other in axes if other != axis]
        by = np.lexsort((*others, centres[axis][order], tile))
        order, tile = order[by], tile[by]
        cuts = max(round(left ** (1 / (len(axes) - place))), 1)
        begins = np.flatnonzero(np.diff(tile, prepend=-1))
        sizes = np.diff(begins, append=count)
        within = np.arange(count) - np.repeat(begins, sizes)
        tile = tile * cuts + within * cuts // np.repeat(sizes, sizes)
        left = -(-left // cuts)
    return order
