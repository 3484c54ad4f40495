# SPDX-License-Identifier: Apache-2.0
"""What a process sends of its values: frames, and what lossy ones have lost (error feedback)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron_ext.errors import UserError
from megatron_ext.outer.error_feedback import lost_in, wanted_of
from megatron_ext.sync_service.peer.parts import Part, Values
from megatron_ext.sync_service.protocol.frames import HEAD_BYTES, Frame, codec_of, cut, step_of
from megatron_ext.sync_service.values.reused_memory import ReusedMemory

__all__ = ["Outgoing", "Piece", "Settled"]

Piece = tuple[Part, int, int]
"""(part, first element of its box, count) of one frame."""


@dataclass(kw_only=True)
class Settled:
    """What is so once a round has counted a contribution, by the parts' keys."""

    owned: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the round has for the parts that this peer alone trains, unless a merge or a guard has made something else
    of them. Until the next contribution, if they are not the values that were uploaded."""

    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    """What is kept then of the parts that were uploaded, 1-D."""

    settled_at: set[tuple[str, int]] = field(default_factory=set)
    """(key, first element) of the frames that this was worked out for."""

    is_over: bool = False
    """Whether the memory is something else's by now: a call that was given up may still make frames."""


class Outgoing:
    """Cuts contributions into frames.

    With a lossy codec it sends pseudo-gradients plus what those that counted before have lost, which is kept here: 12
    bytes per value, with the values of the last round and the place for what the next one loses. Set `sends_gradients`
    to do so in fp32 too, for which it keeps the values.

    Attributes:
        residuals: by the parts' keys, 1-D. Two rounds later their memory is written over.
    """

    def __init__(self, parts: Sequence[Part], codec: str, frame_bytes: int) -> None:
        """Take what the process holds, the codec's name and the bytes of a frame."""
        self.residuals: dict[str, torch.Tensor] = {}
        self.sends_gradients = codec != "fp32"
        self._all_parts = tuple(parts)
        self._parts = [part for part in parts if part.is_primary]
        self._codec = codec
        self._grid = codec_of(codec).grid
        self._frame_bytes = frame_bytes
        self._anchors: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}
        self._owned: dict[str, torch.Tensor] = {}
        self._settled = Settled()
        self._begun_for = -1
        self._scratch = ReusedMemory()

    def continue_from(self, values: Values) -> None:
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
            for offset, count in cut(part.box.numel, self._frame_bytes, self._grid):
                job.append((part, offset, count))
                size += 4 * count
                if size >= call_bytes:
                    yield job
                    job, size = [], 0
        if job:
            yield job

    def begin(self, number: int, index: int) -> None:
        """Prepare for the contribution to a round of a peer of this index, perhaps another time."""
        self._settled.is_over = True
        self._settled, self._begun_for = Settled(), number
        if number == 0 or self._codec == "fp32":
            return
        for part in self._parts_of(number, index):
            self._settled.residuals[part.key] = self._memory(self._spare, part).view(-1)
        for part in self._owned_parts(number, index):
            self._settled.owned[part.key] = self._memory(self._owned, part)

    def batches(self, number: int, job: list[Piece], values: Values) -> Iterator[list[Frame]]:
        """Yield the frames of a job, as many at a time as fill a message; `begin` first."""
        frames: list[Frame] = []
        size, settled = 0, self._settled
        for piece in job:
            frame = self._frame(number, piece, values, settled)
            frames.append(frame)
            size += HEAD_BYTES + len(frame.payload)
            if size >= self._frame_bytes:
                yield frames
                frames, size = [], 0
        if frames:
            yield frames

    def settle(self, number: int, index: int, values: Values) -> Settled:
        """Return what is so when a round has counted the last contribution; `keep_residuals` when it has.

        Args:
            number: the round.
            index: of the peer.
            values: what was uploaded.
        """
        if self._codec == "fp32":
            owned = self._owned_parts(number, index)
            return Settled(owned={part.key: values[part.key] for part in owned if part.key in values})
        if self._begun_for != number:
            self.begin(number, index)  # an earlier process has uploaded it
        # A round that was closed meanwhile has not taken all frames.
        for piece in (piece for job in self.jobs(number, index, self._frame_bytes) for piece in job):
            if (piece[0].key, piece[1]) not in self._settled.settled_at:
                self._frame(number, piece, values, self._settled)
        return self._settled

    def keep_residuals(self, settled: Settled, excluded: Collection[str] = ()) -> None:
        """Keep the residuals of a contribution that a round has counted.

        Args:
            settled: of the contribution.
            excluded: titles of what it did not count in, where the residuals from before stay.
        """
        settled.is_over = True
        still, before = self._keys_of(excluded), self.residuals
        self.residuals = before | {key: memory for key, memory in settled.residuals.items() if key not in still}
        self._spare = {key: memory for key, memory in before.items() if memory is not self.residuals[key]}

    def drop_residuals(self, excluded: Collection[str] = ()) -> None:
        """Drop the residuals: a round has counted a contribution of an earlier process, which brought them.

        Args:
            excluded: as for `keep_residuals`.
        """
        still = self._keys_of(excluded)
        self.residuals = {key: memory for key, memory in self.residuals.items() if key in still}

    def _keys_of(self, titles: Collection[str]) -> set[str]:
        """Return the keys of parts that are judged as what has these titles."""
        return {part.key for part in self._all_parts if part.spec.judged_title in titles}

    @staticmethod
    def _memory(held: dict[str, torch.Tensor], part: Part) -> torch.Tensor:
        """Return fp32 memory for a part, the same as the last time."""
        if part.key not in held:
            held[part.key] = torch.empty(part.box.shape)
        return held[part.key]

    def _parts_of(self, number: int, index: int) -> list[Part]:
        """Return what is sent to a round: at the start everything, later what the peer trains."""
        wanted = [part for part in self._parts if number == 0 or part.spec.is_trained_by(index)]
        # First what others can take before the round is made.
        return sorted(wanted, key=lambda part: len(part.spec.owners) != 1)

    def _owned_parts(self, number: int, index: int) -> list[Part]:
        """Return what a round takes from this peer alone; nothing at the start, which is anybody's."""
        return [part for part in self._parts_of(number, index) if number > 0 and part.spec.owners == (index,)]

    def _frame(self, number: int, piece: Piece, values: Values, settled: Settled) -> Frame:
        part, offset, count = piece
        at = slice(offset, offset + count)
        if number == 0 or not self.sends_gradients:
            value, codec = values[part.key].detach().reshape(-1)[at], "fp32"
        else:
            # A frame in fp32 looks into the memory of its values.
            memory = torch.empty(count) if self._codec == "fp32" else self._scratch("wanted", count)
            value, codec = self._wanted(part.key, at, values, memory), self._codec
        frame = Frame.make(part.spec.name, part.spec.shape, part.box, offset, value, codec)
        if codec != "fp32" and not settled.is_over:
            self._settle(settled, part.key, at, value, frame)
        return frame

    def _settle(self, settled: Settled, key: str, at: slice, wanted: torch.Tensor, frame: Frame) -> None:
        """Work out what is so when what a frame brings counts, while what it was made of is in a processor's cache."""
        arrived = self._scratch("arrived", frame.count)
        frame.decode_into(arrived)
        lost_in(wanted, arrived, out=settled.residuals[key][at])
        if key in settled.owned:
            anchor, step = self._anchors[key].view(-1)[at], step_of(arrived, frame.codec)
            torch.add(step, anchor, out=settled.owned[key].view(-1)[at])
        settled.settled_at.add((key, frame.offset))

    def _wanted(self, key: str, at: slice, values: Values, out: torch.Tensor) -> torch.Tensor:
        """Return what should arrive, in `out`: the pseudo-gradient and what earlier ones have lost."""
        anchor, value = self._anchors[key].view(-1)[at], values[key].detach().reshape(-1)[at]
        return wanted_of(anchor, value, self.residuals[key][at] if key in self.residuals else None, out)
