# SPDX-License-Identifier: Apache-2.0
"""Ranges of whole numbers that have nothing in common; those that touch are joined."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

__all__ = ["Ranges"]

_MOST = 1024
"""Ranges in a piece of the list, so that putting one in between moves few."""


class Ranges:
    """Disjoint half-open ranges. Each call takes about log n steps."""

    __slots__ = ("_end_of", "_firsts", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[list[int]] = []  # where ranges begin, in order
        self._firsts: list[int] = []  # of every piece
        self._end_of: dict[int, int] = {}

    def covers(self, count: int) -> bool:
        """Return whether all numbers from 0 to `count` are in one range."""
        return self._end_of.get(0, 0) >= count

    def touches(self, begin: int, end: int) -> bool:
        """Return whether a range has numbers in common with one that is there."""
        # The last one that begins before this one's end reaches the farthest of them.
        last = self._last_before(end)
        return last is not None and self._end_of[last] > begin

    def add(self, begin: int, end: int) -> None:
        """Take in a range that has nothing in common with the others."""
        if end in self._end_of:
            end = self._remove(end)
        before = self._last_before(begin)
        if before is not None and self._end_of[before] == begin:
            self._end_of[before] = end
        else:
            self._insert(begin)
            self._end_of[begin] = end

    def _last_before(self, number: int) -> int | None:
        """Return where the last range begins that begins below a number; None when none does."""
        place = bisect_left(self._firsts, number) - 1
        if place < 0:
            return None
        piece = self._pieces[place]
        return piece[bisect_left(piece, number) - 1]

    def _insert(self, begin: int) -> None:
        if not self._pieces:
            self._pieces, self._firsts = [[begin]], [begin]
            return
        place = max(bisect_right(self._firsts, begin) - 1, 0)
        piece = self._pieces[place]
        insort(piece, begin)
        self._firsts[place] = piece[0]
        if len(piece) > _MOST:
            self._pieces[place : place + 1] = [piece[: _MOST // 2], piece[_MOST // 2 :]]
            self._firsts.insert(place + 1, piece[_MOST // 2])

    def _remove(self, begin: int) -> int:
        """Take a range out, and return its end."""
        place = bisect_right(self._firsts, begin) - 1
        piece = self._pieces[place]
        del piece[bisect_left(piece, begin)]
        if piece:
            self._firsts[place] = piece[0]
        else:
            del self._pieces[place], self._firsts[place]
        return self._end_of.pop(begin)
