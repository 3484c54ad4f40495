# SPDX-License-Identifier: Apache-2.0
"""What a peer sends of its values: frames, and what lossy ones have lost (error feedback)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.frames import Frame, cut, whole_box

__all__ = ["Outgoing", "Part", "Values"]

Values = Mapping[str, torch.Tensor]
"""Tensors by their global name: fp32, on the CPU."""

Part = tuple[TensorSpec, int, int]
"""(tensor, first element, count) of one frame."""


class Outgoing:
    """Cuts contributions into frames.

    With a lossy codec it sends pseudo-gradients plus what those that counted before have lost, which is kept here: 8
    bytes per value, with the values of the last round.
    """

    def __init__(self, catalog: Catalog, codec: str, frame_bytes: int) -> None:
        """Take the tensors, the codec's name and the bytes of a frame."""
        self.residuals: dict[str, torch.Tensor] = {}
        self._catalog = catalog
        self._codec = codec
        self._frame_bytes = frame_bytes
        self._anchors: dict[str, torch.Tensor] = {}

    def go_on_from(self, values: Values) -> None:
        """Take the values of the round that the next interval begins with."""
        if self._codec != "fp32":
            self._anchors = {name: value.clone() for name, value in values.items()}

    def jobs(self, number: int, index: int, call_bytes: int) -> Iterator[list[Part]]:
        """Yield what goes into one call each.

        Args:
            number: the round.
            index: of the peer.
            call_bytes: of a call, were its frames coded as fp32.
        """
        job: list[Part] = []
        size = 0
        for spec in self._catalog:
            if number > 0 and not spec.is_trained_by(index):
                continue
            for offset, count in cut(spec.numel, self._frame_bytes):
                job.append((spec, offset, count))
                size += 4 * count
                if size >= call_bytes:
                    yield job
                    job, size = [], 0
        if job:
            yield job

    def batches(self, number: int, job: list[Part], values: Values) -> Iterator[list[Frame]]:
        """Yield the frames of a job, as many at a time as fill a message."""
        frames: list[Frame] = []
        size = 0
        for part in job:
            frame = self._frame(number, part, values)
            frames.append(frame)
            size += len(frame.payload)
            if size >= self._frame_bytes:
                yield frames
                frames, size = [], 0
        if frames:
            yield frames

    def counted(self, number: int, index: int, values: Values) -> None:
        """Keep what the contribution to a round has lost, now that the round has counted it."""
        if self._codec == "fp32":
            return
        kept = dict(self.residuals)
        for spec in self._catalog:
            if not spec.is_trained_by(index):
                continue
            residual = torch.empty(spec.numel)
            for offset, count in cut(spec.numel, self._frame_bytes):
                part = slice(offset, offset + count)
                sent = self._frame(number, (spec, offset, count), values).values()
                residual[part] = self._wanted(spec.name, part, values) - sent
            kept[spec.name] = residual
        self.residuals = kept

    def _frame(self, number: int, part: Part, values: Values) -> Frame:
        spec, offset, count = part
        at = slice(offset, offset + count)
        if number == 0 or self._codec == "fp32":
            value, codec = values[spec.name].detach().reshape(-1)[at], "fp32"
        else:
            value, codec = self._wanted(spec.name, at, values), self._codec
        return Frame.make(spec.name, spec.shape, whole_box(spec.shape), offset, value, codec)

    def _wanted(self, name: str, at: slice, values: Values) -> torch.Tensor:
        """Return what should arrive: the pseudo-gradient and what earlier ones have lost."""
        gradient = self._anchors[name].view(-1)[at] - values[name].detach().reshape(-1)[at]
        return gradient.add_(self.residuals[name][at]) if name in self.residuals else gradient
