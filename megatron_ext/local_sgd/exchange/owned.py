# SPDX-License-Identifier: Apache-2.0
"""Which elements a rank owns among the workers: those whose anchor, outer state and outer step are its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.exchange.segment_memory import flattened, packed, unpack
from megatron_ext.local_sgd.exchange.segments import ElementRun, Segment, SegmentPiece
from megatron_ext.transport.collectives import Buffer, from_owners, part_bounds, runs_within

__all__ = ["OwnedRuns"]


class OwnedRuns:
    """Which runs of elements this rank owns, as (index of the segment, run), numbered as in `OuterShard`."""

    def __init__(self, segments: Sequence[Segment], group: Any, *, apart: bool = False) -> None:
        """Find them.

        Args:
            segments: what is exchanged, the same on all ranks of `group`.
            group: process group, one rank per worker in worker order.
            apart: whether every worker owns everything, with values of its own.
        """
        self.apart = apart
        self.segments = segments
        self.group = group
        self.worker = dist.get_rank(group)
        self.workers = dist.get_world_size(group)
        self.numbered: list[tuple[int, ElementRun]] = [
            (index, run)
            for index, segment in enumerate(segments)
            for run in segment.runs(*self.bounds(segment)[self.worker])
        ]
        self._number = {(index, run.start): number for number, (index, run) in enumerate(self.numbered)}

    def bounds(self, segment: Segment) -> list[tuple[int, int]]:
        """Return (first, one past the last) element of a segment that each worker owns."""
        if self.apart:
            return [(0, segment.numel)] * self.workers
        return list(pairwise(part_bounds(segment.numel, self.workers)))

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends when every value travels as fp32, outward and homeward."""
        sent = 0
        for segment in self.segments:
            first, last = self.bounds(segment)[self.worker]
            sent += segment.numel - (last - first) + (self.workers - 1) * (last - first)
        return 4 * sent

    def number(self, index: int, start: int) -> int:
        """Return the number of the run at `start` of this rank's part of segment `index`."""
        return self._number[index, start]

    def pieces(self, segment: Segment, worker: int) -> list[SegmentPiece]:
        """Return what of the tensors a worker owns of a segment."""
        return list(segment.within(*self.bounds(segment)[worker]))

    def runs(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield this rank's runs of `tensors`, which are those that the segments were made of; to look at only."""
        flats = flattened(tensors)
        for segment in self.segments:
            yield from runs_within(packed(segment, flats), *self.bounds(segment)[self.worker])

    def gather(
        self, runs: Sequence[torch.Tensor], like: Sequence[torch.Tensor], at: torch.device | None = None
    ) -> list[torch.Tensor]:
        """Return fp32 tensors like `like`, put together from the runs that each worker owns; all must call it.

        Where every worker owns everything they are this one's, and nothing is exchanged.

        Args:
            runs: this rank's.
            like: tensors of the shapes to return, on the device over which the workers exchange.
            at: where to put what is returned: there as well when None. Elsewhere, segments visit that device.
        """
        tensors = [torch.empty(value.shape, dtype=torch.float32, device=at or value.device) for value in like]
        flats = flattened(tensors)

        def buffers() -> Iterator[Buffer]:
            rest = iter(runs)
            for segment in self.segments:
                # The same memory, where it is on that device already.
                buffer = [part.to(like[0].device) for part in packed(segment, flats)]
                for run in runs_within(buffer, *self.bounds(segment)[self.worker]):
                    run.copy_(next(rest))
                yield buffer

        whole = buffers() if self.apart else from_owners(buffers(), self.group)
        for segment, buffer in zip(self.segments, whole, strict=True):
            if at is not None and at != like[0].device:
                parts = packed(segment, flats)
                for part, visitor in zip(parts, buffer, strict=True):
                    part.copy_(visitor)
                buffer = parts
            unpack(segment, buffer, flats)
        return tensors
