# SPDX-License-Identifier: Apache-2.0
"""Boxes of tensors that are filled by frames, as they come in streams that may fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_ext.sync_service.channel.connection import DamagedOnTheWay
from megatron_ext.sync_service.protocol.frames import Box, Frame, step_of
from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = ["Incoming", "Place"]

Place = tuple[str, Box]
"""A tensor's name and a box of it."""


class Incoming:
    """Values of boxes in flight.

    Attributes:
        left: boxes that are not whole yet, in the order in which they were asked for; a box that is whole is not asked
            for again when a stream fails.
        count: values that have come since the beginning.
    """

    def __init__(
        self,
        places: Iterable[Place],
        base: Mapping[Place, torch.Tensor],
        memory: Mapping[Place, torch.Tensor] | None = None,
        *,
        gradients: bool = False,
    ) -> None:
        """Expect boxes.

        Args:
            places: which.
            base: values of the round before, to which updates are added; where there are none, only values may come.
            gradients: it is pseudo-gradients that come, which are subtracted.
            memory: where the values of a box go, fp32 in its shape; memory of its own, taken when its first frame
                comes, for those that are not there.
        """
        self._base = base
        self._gradients = gradients
        self._memory = dict(memory or {})
        self.left: dict[Place, None] = dict.fromkeys(places)
        self.count = 0
        self._arrived = dict.fromkeys(self.left, 0)

    def begin_stream(self) -> None:
        """Begin with another stream, which may have other values for the boxes that are left."""
        self._arrived = dict.fromkeys(self.left, 0)

    def arrived(self, place: Place) -> int:
        """Return how many values of a box that is left have come: where a stream of the same values continues."""
        return self._arrived[place]

    def take(self, frame: Frame) -> None:
        """Take the values of a frame.

        Raises:
            DamagedOnTheWay: it is damaged, or not the next one of a box that is left.
        """
        try:
            frame.check()
        except Refusal as refusal:
            raise DamagedOnTheWay(str(refusal)) from refusal
        place = (frame.name, frame.box)
        if place not in self.left or frame.offset != self._arrived[place]:
            raise DamagedOnTheWay(f"a frame that was not asked for: {frame.place}")
        if place not in self._memory:
            self._memory[place] = torch.empty(frame.box.shape)
        at = slice(frame.offset, frame.offset + frame.count)
        values = self._memory[place].view(-1)
        if frame.codec == "fp32":
            frame.decode_into(values[at])
        elif place in self._base:
            frame.decode_into(values[at])
            update = step_of(values[at], frame.codec) if self._gradients else values[at]
            torch.add(self._base[place].view(-1)[at], update, out=values[at])
        else:
            raise DamagedOnTheWay(f"an update that was not asked for: {frame.place}")
        self._arrived[place] += frame.count
        self.count += frame.count
        if self._arrived[place] == values.numel():
            del self.left[place]

    def take_as(self, place: Place, values: torch.Tensor) -> None:
        """Take values that a box is said to have, unless it is whole already."""
        if place in self.left:
            self._memory[place].copy_(values.view(place[1].shape))
            self.count += values.numel()
            del self.left[place]

    def take_whole(self) -> dict[Place, torch.Tensor]:
        """Return the boxes that are whole."""
        return {place: values for place, values in self._memory.items() if place not in self.left}
