# SPDX-License-Identifier: Apache-2.0
"""Which elements of a tensor have arrived: every one has to, and none twice."""

from __future__ import annotations

from bisect import bisect_right

from megatron_ext.sync_service.frames import Box, Frame
from megatron_ext.sync_service.refusal import Refusal

__all__ = ["Coverage"]


class Coverage:
    """Keeps account of the frames of one tensor. Boxes that differ must not touch each other, nor ranges of a box."""

    def __init__(self) -> None:
        self.covered = 0
        self._boxes: dict[Box, list[tuple[int, int]]] = {}

    def check(self, frame: Frame) -> None:
        """Check that a frame has nothing in common with those that are there.

        Raises:
            Refusal: it has.
        """
        if frame.box not in self._boxes:
            if any(box.overlaps(frame.box) for box in self._boxes):
                raise Refusal("invalid", f"a frame's box overlaps one that has arrived before ({frame.place})")
            return
        ranges = self._boxes[frame.box]
        at = bisect_right(ranges, (frame.offset, 0))
        before = ranges[at - 1][1] if at > 0 else 0
        after = ranges[at][0] if at < len(ranges) else frame.box.numel
        if frame.offset < before or frame.offset + frame.count > after:
            raise Refusal("invalid", f"a frame overlaps one that has arrived before ({frame.place})")

    def add(self, frame: Frame) -> None:
        """Take a checked frame in."""
        ranges = self._boxes.setdefault(frame.box, [])
        ranges.insert(bisect_right(ranges, (frame.offset, 0)), (frame.offset, frame.offset + frame.count))
        self.covered += frame.count
