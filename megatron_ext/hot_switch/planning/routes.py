# SPDX-License-Identifier: Apache-2.0
"""Routes: which slices of a tensor stay, which must move, and who could send them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["Demand", "SliceRoute", "make_route"]

Ranks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """One slice that one rank lacks."""

    slice_index: int
    """The slice, from 0."""

    receiver: int
    """The rank that needs it."""

    owners: Ranks
    """All ranks that hold it, ascending."""

    near_owners: Ranks
    """Those among them on the receiver's node."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SliceRoute:
    """What must move for every tensor that lies on the same ranks before and after a switch.

    Slices are equal, and as many as the least common multiple of the source's and the target's parts, so that every
    rank holds and needs whole ones. Where a tensor has several blocks (gate and up projection), a slice has its share
    of each.
    """

    source_parts: int
    """Equal parts in the source layout."""

    target_parts: int
    """Equal parts in the target layout."""

    slices: int
    """Number of slices."""

    demands: tuple[Demand, ...]
    """What must move, by slice, and by receiver within a slice."""

    source_part: dict[int, int]
    """Every rank that holds a part before the switch, and which one."""

    target_part: dict[int, int]
    """Every rank that holds a part after the switch, and which one."""

    def kept(self, rank: int) -> range:
        """Return the slices that `rank` holds before and after the switch."""
        if rank not in self.source_part or rank not in self.target_part:
            return range(0)
        before = _slices_of(self.source_part[rank], self.source_parts, self.slices)
        after = _slices_of(self.target_part[rank], self.target_parts, self.slices)
        first = max(before.start, after.start)
        return range(first, max(first, min(before.stop, after.stop)))

    @cached_property
    def receivers(self) -> npt.NDArray[np.int32]:
        """The receiver of each demand."""
        return np.array([demand.receiver for demand in self.demands], dtype=np.int32)

    @cached_property
    def complete(self) -> frozenset[int]:
        """The ranks that need a part after the switch and hold all of its slices before."""
        needed = self.slices // self.target_parts
        return frozenset(rank for rank in self.target_part if len(self.kept(rank)) == needed)


def make_route(source: Sequence[Ranks], target: Sequence[Ranks], gpus_per_node: int) -> SliceRoute:
    """Compare who holds the parts of a tensor before and after a switch.

    Args:
        source: for each part before the switch the ranks that hold it, ascending.
        target: the same after the switch.
        gpus_per_node: ranks of a node; node i has the ranks from i * gpus_per_node.
    """
    slices = math.lcm(len(source), len(target))
    demands = []
    for slice_index in range(slices):
        owners = source[slice_index * len(source) // slices]
        on_node: dict[int, list[int]] = {}
        for owner in owners:
            on_node.setdefault(owner // gpus_per_node, []).append(owner)
        near = {node: tuple(ranks) for node, ranks in on_node.items()}
        held = set(owners)
        demands += [
            Demand(
                slice_index=slice_index,
                receiver=receiver,
                owners=owners,
                near_owners=near.get(receiver // gpus_per_node, ()),
            )
            for receiver in target[slice_index * len(target) // slices]
            if receiver not in held
        ]
    return SliceRoute(
        source_parts=len(source),
        target_parts=len(target),
        slices=slices,
        demands=tuple(demands),
        source_part={rank: part for part, ranks in enumerate(source) for rank in ranks},
        target_part={rank: part for part, ranks in enumerate(target) for rank in ranks},
    )


def _slices_of(part: int, parts: int, slices: int) -> range:
    return range(part * slices // parts, (part + 1) * slices // parts)
