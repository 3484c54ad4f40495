# SPDX-License-Identifier: Apache-2.0
"""Local SGD on a list of fp32 tensors: the anchor, the schedule, and the outer round.

The engine knows tensors and a process group, not Megatron: it is given the authoritative fp32 values of this rank
(with the distributed optimizer its shard, so anchor, outer state and traffic are sharded too).

One round, as in DiLoCo (arXiv 2311.08105, Algorithm 1): the pseudo-gradient of worker i is anchor - theta_i; its
mean over the workers is the gradient of the outer optimizer, which moves the anchor; every worker goes on from
the new anchor.

The outer step is sharded over the workers as well. Every element has an owner among them: the others send it their
theta_i, it alone keeps the anchor and the outer state, makes the step, and sends the new anchor back. So a round
costs the traffic of one all-reduce, and anchor and momentum together take 8 / W bytes per element of the shard.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.config import LocalSGDConfig, OuterOptimizerConfig
from megatron_ext.local_sgd.digest import equal_across
from megatron_ext.local_sgd.outer_optimizer import OuterOptimizer, build_outer_optimizer
from megatron_ext.local_sgd.packing import flattened, packed, put_back, unpack
from megatron_ext.local_sgd.segments import Run, Segment, plan_segments
from megatron_ext.transport.collectives import (
    CACHED_NUMEL,
    SEGMENT_NUMEL,
    Buffer,
    from_owners,
    part_bounds,
    runs_within,
    through_owners,
)

__all__ = ["LocalSGD", "RoundReport", "SyncedTensor"]

# Tensors below this many elements are packed: a message of their own would cost more than the copy.
SMALL_NUMEL = 1 << 14


@dataclass(frozen=True, kw_only=True)
class SyncedTensor:
    """One tensor that the workers agree on in every round."""

    tensor: torch.Tensor
    """fp32, any shape, updated in place."""

    name: str
    """Its global name, for messages."""

    unit: str
    """The unit it belongs to: one of those that the engine was told of."""

    counted: bool = True
    """Whether it counts in norms over the worker (False for a replica of what another rank counts)."""


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What one outer round did on this rank."""

    round: int
    """Number of the round, from 1."""

    pseudo_gradient_norm: float
    """L2 norm of the mean pseudo-gradient over the whole model."""

    unit_norms: dict[str, float]
    """The same over each unit, in model order."""

    worker_norms: list[float]
    """L2 norm of each worker's own pseudo-gradient over the whole model."""

    bytes_sent: int
    """Bytes that this rank sent to other workers."""

    seconds: float
    """Wall time of the round on this rank, waiting included."""


class LocalSGD:
    """The state of local SGD on one rank, and its rounds."""

    def __init__(
        self,
        synced: Sequence[SyncedTensor],
        *,
        units: Sequence[str],
        config: LocalSGDConfig,
        outer: OuterOptimizerConfig,
        across: Any,
        inside: Any,
    ) -> None:
        """Prepare; no memory is taken before the anchor is.

        Args:
            synced: authoritative fp32 tensors of this rank; the same names and shapes on all ranks of `across`.
            units: every unit of the model in model order; the same on all ranks, also where a rank holds no
                tensor of a unit.
            config: schedule and workers.
            outer: the outer optimizer.
            across: process group of the ranks that hold the same values, one per worker, in worker order.
            inside: process group of all ranks of this worker.
        """
        self.config = config
        self.outer = outer
        self.synced_tensors = tuple(synced)
        self.values = [entry.tensor for entry in synced]
        self.units = tuple(units)
        self.across = across
        self.inside = inside
        self.rounds = 0
        self.steps_since_sync = 0
        self._anchors: list[torch.Tensor] | None = None
        self._optimizer: OuterOptimizer | None = None
        self._segments = plan_segments(
            [value.numel() for value in self.values],
            [self.units.index(entry.unit) for entry in synced],
            limit=SEGMENT_NUMEL,
            small=SMALL_NUMEL,
        )
        # The runs of elements that this rank owns, in the order in which they are exchanged, and where each is found.
        owned = [
            (index, run)
            for index, segment in enumerate(self._segments)
            for run in segment.runs(*self._own_bounds(segment))
        ]
        self._number = {(index, run.start): number for number, (index, run) in enumerate(owned)}
        self._counted = [self._counted_ranges(run) for _, run in owned]
        self._device = self.values[0].device if self.values else _collective_device(inside)

    @property
    def in_warmup(self) -> bool:
        """Whether no anchor was taken yet."""
        return self._anchors is None

    @property
    def synced(self) -> bool:
        """Whether all workers hold the same values now: in warm-up, or right after a round."""
        return self.in_warmup or self.steps_since_sync == 0

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Remember the present values, which must be equal on all workers, as the anchor.

        Raises:
            RuntimeError: they are not equal, so that there is nothing for the workers to agree on.
        """
        if not equal_across(self.values, self.across, self._device):
            differs = (
                entry.name
                for entry in self.synced_tensors
                if not equal_across([entry.tensor], self.across, self._device)
            )
            raise RuntimeError(
                f"the workers' weights differ where the anchor is to be taken, first in {next(differs)}; they must "
                "start equal (check --data-parallel-random-init and any code of your own that changes weights per "
                "rank)"
            )
        self._start(self._own_parts(self.values))

    def count_step(self) -> bool:
        """Count one inner step of all workers, skipped updates included; return whether a round is due."""
        self.steps_since_sync += 1
        return self.steps_since_sync >= self.config.local_sgd_sync_interval

    @torch.no_grad()
    def sync(self) -> RoundReport:
        """Run one outer round: collect, reduce, outer step, apply.

        Raises:
            RuntimeError: a worker brought weights that are not finite. They have spread by then; the run must
                end without saving.
        """
        assert self._anchors is not None, "a round needs an anchor"
        start = time.perf_counter()
        workers = dist.get_world_size(self.across)
        # Squared norms per unit: of every worker's pseudo-gradient, and in the last row of their mean.
        squares = torch.zeros(workers + 1, len(self.units), dtype=torch.float64, device=self._device)
        flats = flattened(self.values)

        scratch = self._scratch()

        def combine(index: int, start: int, terms: list[torch.Tensor]) -> None:
            run = self._number[index, start]
            self._step(run, terms, squares[:, self._segments[index].unit], scratch)

        buffers = (packed(segment, flats) for segment in self._segments)
        for segment, buffer in zip(self._segments, through_owners(buffers, self.across, combine), strict=True):
            unpack(segment, buffer, flats)
        put_back(flats, self.values)
        self.rounds += 1
        self.steps_since_sync = 0
        dist.all_reduce(squares, group=self.across)
        dist.all_reduce(squares, group=self.inside)
        return self._report(squares, time.perf_counter() - start)

    def _scratch(self) -> torch.Tensor:
        """Return two rows of memory, as long as what the outer step works on at a time."""
        assert self._anchors is not None and self._optimizer is not None
        longest = max((anchor.numel() for anchor in self._anchors), default=1)
        if self._optimizer.elementwise and self._device.type == "cpu":
            longest = min(longest, CACHED_NUMEL)
        return torch.empty(2, longest, device=self._device)

    def _step(self, run: int, terms: list[torch.Tensor], squares: torch.Tensor, scratch: torch.Tensor) -> None:
        """Make the outer step on a run of elements that this rank owns.

        Args:
            run: its number.
            terms: the workers' values of the run, in worker order; this rank's own become the new anchor.
            squares: to which the squared norms are added, of each worker's pseudo-gradient and of their mean.
            scratch: from `_scratch`.
        """
        assert self._anchors is not None and self._optimizer is not None
        own = terms[dist.get_rank(self.across)]
        for start in range(0, own.numel(), scratch.shape[1]):
            part = slice(start, min(start + scratch.shape[1], own.numel()))
            anchor = self._anchors[run][part]
            total, other = scratch[0, : anchor.numel()], scratch[1, : anchor.numel()]
            torch.sub(anchor, terms[0][part], out=total)
            self._add_square(squares[0], total, run, start)
            for worker, term in enumerate(terms[1:], start=1):
                torch.sub(anchor, term[part], out=other)
                self._add_square(squares[worker], other, run, start)
                total.add_(other)
            mean = total.div_(len(terms))
            self._add_square(squares[-1], mean, run, start)
            self._optimizer.step(run, part, mean)
            own[part] = anchor

    def _add_square(self, total: torch.Tensor, part: torch.Tensor, run: int, start: int) -> None:
        """Add to `total` the squared norm of those elements of `part` that count; it is at `start` of the run."""
        for first, last in self._counted[run]:
            within = part[max(first - start, 0) : max(last - start, 0)]
            total += within.dot(within)

    def _counted_ranges(self, run: Run) -> list[tuple[int, int]]:
        """Return the ranges of a run that count in norms."""
        ranges = []
        offset = 0
        for piece in run.pieces:
            if self.synced_tensors[piece.index].counted:
                ranges.append((offset, offset + piece.numel))
            offset += piece.numel
        return ranges

    def _report(self, squares: torch.Tensor, seconds: float) -> RoundReport:
        """Return the report of the round that has just ended, whose squared norms these are.

        Raises:
            RuntimeError: some are not finite.
        """
        *by_worker, mean = squares.tolist()
        broken = []
        for worker, norms in enumerate(by_worker):
            units = [unit for unit, square in zip(self.units, norms, strict=True) if not math.isfinite(square)]
            if units:
                broken.append(f"worker {worker} had weights that are not finite in {_listed(units)}")
        if broken:
            raise RuntimeError(
                f"outer round {self.rounds}: {'; '.join(broken)}. The run ends here and saves nothing. Resume from the "
                "last checkpoint, with a lower learning rate or with the cause removed"
            )
        sent = 0
        for segment in self._segments:
            first, last = self._own_bounds(segment)
            sent += segment.numel - (last - first) + (len(by_worker) - 1) * (last - first)
        return RoundReport(
            round=self.rounds,
            pseudo_gradient_norm=math.sqrt(math.fsum(mean)),
            unit_norms={unit: math.sqrt(square) for unit, square in zip(self.units, mean, strict=True)},
            worker_norms=[math.sqrt(math.fsum(norms)) for norms in by_worker],
            bytes_sent=4 * sent,
            seconds=seconds,
        )

    # State.

    @torch.no_grad()
    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Gather anchor and outer optimizer tensors from their owners; all ranks of `across` must call it.

        Returns:
            Lists by name, in the order and shapes of the values; empty in warm-up.
        """
        if self._anchors is None or self._optimizer is None:
            return {}
        parts = {"anchor": self._anchors, **self._optimizer.tensor_state()}
        return {name: self._gathered(owned) for name, owned in parts.items()}

    def gather_anchor(self) -> list[torch.Tensor]:
        """Return the anchor in the order and shapes of the values; all ranks of `across` must call it."""
        assert self._anchors is not None, "there is no anchor in warm-up"
        return self._gathered(self._anchors)

    def scalar_state(self) -> dict[str, Any]:
        """Return the counters, equal on all ranks."""
        return {
            "rounds": self.rounds,
            "steps_since_sync": self.steps_since_sync,
            "outer_scalars": {} if self._optimizer is None else self._optimizer.scalar_state(),
        }

    @torch.no_grad()
    def load(self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, Any]) -> None:
        """Take over a saved state.

        Args:
            tensors: as `tensor_state` returned them, perhaps with another number of workers.
            scalars: as `scalar_state` returned them.
        """
        if tensors:
            parts = {name: self._own_parts(values) for name, values in tensors.items()}
            self._start(parts.pop("anchor"))
            assert self._optimizer is not None
            self._optimizer.load(parts, scalars["outer_scalars"])
        self.rounds = int(scalars["rounds"])
        self.steps_since_sync = int(scalars["steps_since_sync"])

    def _start(self, anchors: list[torch.Tensor]) -> None:
        """Begin an interval at these parts of the anchor."""
        self._anchors = anchors
        self._optimizer = build_outer_optimizer(self.outer, anchors)
        self.steps_since_sync = 0

    def _own_bounds(self, segment: Segment) -> tuple[int, int]:
        """Return which elements of a segment this rank owns."""
        rank = dist.get_rank(self.across)
        bounds = part_bounds(segment.numel, dist.get_world_size(self.across))
        return bounds[rank], bounds[rank + 1]

    def _own_parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of this rank's runs of `tensors`, which are like the values."""
        flats = flattened(tensors)
        return [
            run.clone()
            for segment in self._segments
            for run in runs_within(packed(segment, flats), *self._own_bounds(segment))
        ]

    def _gathered(self, owned: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors like the values, put together from the runs that the workers own."""
        tensors = [torch.empty(value.shape, dtype=torch.float32, device=value.device) for value in self.values]
        flats = flattened(tensors)

        def buffers() -> Iterator[Buffer]:
            rest = iter(owned)
            for segment in self._segments:
                buffer = packed(segment, flats)
                for run in runs_within(buffer, *self._own_bounds(segment)):
                    run.copy_(next(rest))
                yield buffer

        for segment, buffer in zip(self._segments, from_owners(buffers(), self.across), strict=True):
            unpack(segment, buffer, flats)
        return tensors


def _listed(names: Sequence[str], limit: int = 5) -> str:
    """Return names for a message, the first few of them when there are many."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more units" if rest > 0 else "")


def _collective_device(group: Any) -> torch.device:
    """Return a device whose tensors the group's backend can carry."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
