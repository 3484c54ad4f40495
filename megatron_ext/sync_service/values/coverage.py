# SPDX-License-Identifier: Apache-2.0
"""Which elements of a tensor have arrived: every one has to, and none twice."""

from __future__ import annotations

from megatron_ext.sync_service.protocol.frames import Box, Frame
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.values.disjoint_boxes import DisjointBoxes
from megatron_ext.sync_service.values.ranges import Ranges

__all__ = ["Coverage"]


class Coverage:
    """Keeps account of the frames of one tensor. Boxes that differ must not touch each other, nor ranges of a box.

    n frames cost about n log n steps, in whichever order they come; see `DisjointBoxes` for where it is more.
    """

    def __init__(self) -> None:
        self.covered = 0
        self._ranges: dict[Box, Ranges | None] = {}  # None: all of the box has arrived
        self._boxes: DisjointBoxes | None = None

    @property
    def boxes(self) -> int:
        """How many boxes there are frames of."""
        return len(self._ranges)

    def has(self, box: Box) -> bool:
        """Return whether there are frames of a box."""
        return box in self._ranges

    def check(self, frame: Frame) -> None:
        """Check that a frame has nothing in common with those that are there.

        Raises:
            Refusal: it has.
        """
        if frame.box not in self._ranges:
            if self._boxes is not None and self._boxes.touches(frame.box):
                raise Refusal("invalid", f"a frame's box overlaps one that has arrived before ({frame.place})")
            return
        ranges = self._ranges[frame.box]
        if ranges is None or ranges.touches(frame.offset, frame.offset + frame.count):
            raise Refusal("invalid", f"a frame overlaps one that has arrived before ({frame.place})")

    def add(self, frame: Frame) -> None:
        """Take a checked frame in."""
        box = frame.box
        if box not in self._ranges:
            if self._boxes is None:
                self._boxes = DisjointBoxes(len(box.start))
            self._boxes.add(box)
            self._ranges[box] = None if frame.count == box.numel else Ranges()
        ranges = self._ranges[box]
        if ranges is not None:
            ranges.add(frame.offset, frame.offset + frame.count)
            if ranges.covers(box.numel):
                self._ranges[box] = None
        self.covered += frame.count
