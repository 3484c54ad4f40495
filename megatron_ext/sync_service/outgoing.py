# SPDX-License-Identifier: Apache-2.0
"""What a process sends of its values: frames, and what lossy ones have lost (error feedback)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.frames import HEAD_BYTES, Frame, arriving, cut, step_of
from megatron_ext.sync_service.parts import Part, Values

__all__ = ["Outgoing", "Piece"]

Piece = tuple[Part, int, int]
"""(part, first element of its box, count) of one frame."""


class Outgoing:
    """Cuts contributions into frames.

    With a lossy codec it sends pseudo-gradients plus what those that counted before have lost, which is kept here: 8
    bytes per value, with the values of the last round. Set `sends_gradients` to do so in fp32 too, for which it keeps
    those values.
    """

    def __init__(self, parts: Sequence[Part], codec: str, frame_bytes: int) -> None:
        """Take what the process holds, the codec's name and the bytes of a frame."""
        self.residuals: dict[str, torch.Tensor] = {}
        self.sends_gradients = codec != "fp32"
        self._all_parts = tuple(parts)
        self._parts = [part for part in parts if part.is_primary]
        self._codec = codec
        self._frame_bytes = frame_bytes
        self._anchors: dict[str, torch.Tensor] = {}

    def go_on_from(self, values: Values) -> None:
        """Take the values of the round that the next interval begins with."""
        if not self.sends_gradients:
            return
        for part in self._all_parts:
            if part.key in self._anchors:
                self._anchors[part.key].copy_(values[part.key])
            else:
                self._anchors[part.key] = values[part.key].clone()

    @property
    def anchors(self) -> Values:
        """The values of the round that the interval began with, by the parts' keys, where pseudo-gradients are sent."""
        return self._anchors

    def check(self, number: int, index: int, values: Values) -> None:
        """Check that values are there for what a peer of this index sends to a round, in the shapes of the parts.

        Raises:
            UserError: one is missing or of another kind.
        """
        for part in self._parts_of(number, index):
            value = values.get(part.key)
            if value is None:
                raise UserError(f"tensor {part.key!r} of the catalog is not among the values")
            if tuple(value.shape) != part.box.shape or value.dtype != torch.float32 or value.device.type != "cpu":
                raise UserError(
                    f"tensor {part.key!r} is {value.dtype} of shape {tuple(value.shape)} on {value.device}; it must "
                    f"be torch.float32 of shape {part.box.shape} on the CPU"
                )

    def jobs(
        self, number: int, index: int, call_bytes: int, goes: Callable[[str], bool] = lambda name: True
    ) -> Iterator[list[Piece]]:
        """Yield what goes into one call each.

        Args:
            number: the round.
            index: of the peer.
            call_bytes: of a call, were its frames coded as fp32.
            goes: whether a tensor is sent, given its name.
        """
        job: list[Piece] = []
        size = 0
        for part in self._parts_of(number, index):
            if not goes(part.spec.name):
                continue
            for offset, count in cut(part.box.numel, self._frame_bytes):
                job.append((part, offset, count))
                size += 4 * count
                if size >= call_bytes:
                    yield job
                    job, size = [], 0
        if job:
            yield job

    def batches(self, number: int, job: list[Piece], values: Values) -> Iterator[list[Frame]]:
        """Yield the frames of a job, as many at a time as fill a message."""
        frames: list[Frame] = []
        size = 0
        for piece in job:
            frame = self._frame(number, piece, values)
            frames.append(frame)
            size += HEAD_BYTES + len(frame.payload)
            if size >= self._frame_bytes:
                yield frames
                frames, size = [], 0
        if frames:
            yield frames

    def residuals_after(self, number: int, index: int, values: Values) -> dict[str, torch.Tensor]:
        """Return what is owed when a round has counted a contribution.

        Args:
            number: the round.
            index: of the peer.
            values: what was uploaded.
        """
        if self._codec == "fp32":
            return self.residuals
        kept = dict(self.residuals)
        for part in self._parts_of(number, index):
            residual = torch.empty(part.box.numel)
            for offset, count in cut(part.box.numel, self._frame_bytes):
                at = slice(offset, offset + count)
                wanted = self._wanted(part.key, at, values)
                torch.sub(wanted, arriving(wanted, self._codec), out=residual[at])
            kept[part.key] = residual
        return kept

    def owned(self, number: int, index: int, values: Values) -> dict[str, torch.Tensor]:
        """Return what a round that counts this contribution has for the parts that this peer alone trains.

        A merge or a guard may have made something else of them.

        Args:
            number: the round, above 0.
            index: of the peer.
            values: what was uploaded.
        """
        found = {}
        for part in self._parts_of(number, index):
            if part.spec.owners != (index,) or part.key not in values:
                continue
            if self._codec == "fp32":
                found[part.key] = values[part.key]
                continue
            step = torch.empty(part.box.numel)
            for offset, count in cut(part.box.numel, self._frame_bytes):
                at = slice(offset, offset + count)
                step[at] = step_of(arriving(self._wanted(part.key, at, values), self._codec), self._codec)
            found[part.key] = step.add_(self._anchors[part.key].view(-1)).view(part.box.shape)
        return found

    def _parts_of(self, number: int, index: int) -> list[Part]:
        """Return what is sent to a round: at the start everything, later what the peer trains."""
        wanted = [part for part in self._parts if number == 0 or part.spec.is_trained_by(index)]
        # First what others can take before the round is made.
        return sorted(wanted, key=lambda part: len(part.spec.owners) != 1)

    def _frame(self, number: int, piece: Piece, values: Values) -> Frame:
        part, offset, count = piece
        at = slice(offset, offset + count)
        if number == 0 or not self.sends_gradients:
            value, codec = values[part.key].detach().reshape(-1)[at], "fp32"
        else:
            value, codec = self._wanted(part.key, at, values), self._codec
        return Frame.make(part.spec.name, part.spec.shape, part.box, offset, value, codec)

    def _wanted(self, key: str, at: slice, values: Values) -> torch.Tensor:
        """Return what should arrive: the pseudo-gradient and what earlier ones have lost."""
        gradient = self._anchors[key].view(-1)[at] - values[key].detach().reshape(-1)[at]
        return gradient.add_(self.residuals[key][at]) if key in self.residuals else gradient
