# SPDX-License-Identifier: Apache-2.0
"""Cutting the tensors of a rank into segments: what one exchange of a round carries.

A segment holds elements of one unit only, so that whatever is decided per unit is one decision per segment. Pieces
of large tensors are exchanged from and into their own memory; the small tensors of a unit travel in a packed copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["ElementRun", "Segment", "SegmentPiece", "plan_segments"]


@dataclass(frozen=True, kw_only=True)
class SegmentPiece:
    """Elements `start` to `stop` of the flattened tensor `index`."""

    index: int
    """Which tensor."""

    start: int
    """First element."""

    stop: int
    """One past the last element."""

    @property
    def numel(self) -> int:
        """Number of elements, at least 1."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Pieces that are exchanged together, one after the other."""

    unit: int
    """Index of the unit that all pieces belong to."""

    pieces: tuple[SegmentPiece, ...]
    """Pieces that are exchanged in place; with `small` at least one."""

    small: tuple[SegmentPiece, ...] = ()
    """Pieces after those, which are exchanged in one packed copy."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(piece.numel for piece in (*self.pieces, *self.small))

    def within(self, start: int, stop: int) -> Iterator[SegmentPiece]:
        """Yield what of each piece lies in elements `start` to `stop` of the segment."""
        offset = 0
        for piece in (*self.pieces, *self.small):
            first, last = max(start, offset), min(stop, offset + piece.numel)
            if first < last:
                shift = piece.start - offset
                yield SegmentPiece(index=piece.index, start=first + shift, stop=last + shift)
            offset += piece.numel

    def runs(self, start: int, stop: int) -> Iterator[ElementRun]:
        """Yield what of elements `start` to `stop` is contiguous while it is exchanged: each piece, all small ones."""
        large = {piece.index for piece in self.pieces}
        offset = 0
        packed = []
        for piece in self.within(start, stop):
            if piece.index in large:
                yield ElementRun(start=offset, pieces=(piece,))
                offset += piece.numel
            else:
                packed.append(piece)
        if packed:
            yield ElementRun(start=offset, pieces=tuple(packed))


@dataclass(frozen=True, kw_only=True)
class ElementRun:
    """Elements that are contiguous while they are exchanged."""

    start: int
    """Offset of the first, counted from the first element of the part that the run belongs to."""

    pieces: tuple[SegmentPiece, ...]
    """What they are."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(piece.numel for piece in self.pieces)


def plan_segments(sizes: Sequence[int], units: Sequence[int], limit: int, small: int) -> list[Segment]:
    """Return segments that hold every element of every tensor exactly once, unit after unit.

    A unit of more than `limit` elements is cut into segments of nearly equal size.

    Args:
        sizes: numbers of elements of the tensors, 0 or more.
        units: the unit of each.
        limit: elements of the largest segment, at least 1.
        small: tensors of fewer elements are packed.
    """
    segments = []
    for unit in sorted(set(units)):
        members = [index for index, of in enumerate(units) if of == unit]
        order = sorted(members, key=lambda index: sizes[index] < small)
        whole = Segment(
            unit=unit,
            pieces=tuple(SegmentPiece(index=index, start=0, stop=sizes[index]) for index in order if sizes[index]),
        )
        count = -(-whole.numel // limit)
        for number in range(count):
            start, stop = whole.numel * number // count, whole.numel * (number + 1) // count
            pieces = list(whole.within(start, stop))
            segments.append(
                Segment(
                    unit=unit,
                    pieces=tuple(piece for piece in pieces if sizes[piece.index] >= small),
                    small=tuple(piece for piece in pieces if sizes[piece.index] < small),
                )
            )
    return segments
