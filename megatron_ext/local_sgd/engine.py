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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.config import GTAConfig, LocalSGDConfig, OuterOptimizerConfig
from megatron_ext.local_sgd.digest import equal_across
from megatron_ext.local_sgd.outer_optimizer import build_outer_optimizer
from megatron_ext.local_sgd.packing import flattened, packed, put_back, unpack
from megatron_ext.local_sgd.penalty import Penalty, Verdict, clip_coefficient
from megatron_ext.local_sgd.reducers import build_reducer, build_sparsifier
from megatron_ext.local_sgd.report import RoundClock, RoundReport, listed
from megatron_ext.local_sgd.segments import Run, Segment, plan_segments
from megatron_ext.local_sgd.shard import OuterShard
from megatron_ext.transport.collectives import (
    SEGMENT_NUMEL,
    Buffer,
    Exchange,
    Memory,
    from_owners,
    part_bounds,
    runs_within,
    through_owners,
)

__all__ = ["LocalSGD", "SyncedTensor"]

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


class LocalSGD:
    """The state of local SGD on one rank, and its rounds."""

    def __init__(
        self,
        synced: Sequence[SyncedTensor],
        *,
        units: Sequence[str],
        config: LocalSGDConfig,
        outer: OuterOptimizerConfig,
        gta: GTAConfig,
        across: Any,
        inside: Any,
        observe: bool = False,
    ) -> None:
        """Prepare; no memory is taken before the anchor is.

        Args:
            synced: authoritative fp32 tensors of this rank; the same names and shapes on all ranks of `across`.
            units: every unit of the model in model order; the same on all ranks, also where a rank holds no
                tensor of a unit.
            config: schedule, workers and penalty.
            outer: the outer optimizer.
            gta: how pseudo-gradients become one.
            across: process group of the ranks that hold the same values, one per worker, in worker order.
            inside: process group of all ranks of this worker.
            observe: compare every pseudo-gradient with the outer momentum, for the report.
        """
        self.config = config
        self.outer = outer
        self.gta = gta
        self.synced_tensors = tuple(synced)
        self.values = [entry.tensor for entry in synced]
        self.units = tuple(units)
        self.across = across
        self.inside = inside
        self._observe = observe
        self.rounds = 0
        self.steps_since_sync = 0
        self._penalty = Penalty(config, workers=dist.get_world_size(across), units=len(self.units))
        self._shard: OuterShard | None = None
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
        self._tensors = [self._ranges(run) for _, run in owned]
        self._counted = [self._ranges(run, counted=True) for _, run in owned]
        self._device = self.values[0].device if self.values else _collective_device(inside)

    @property
    def in_warmup(self) -> bool:
        """Whether no anchor was taken yet."""
        return self._shard is None

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
        """Run one outer round: collect, guard, reduce, outer step, apply.

        Raises:
            RuntimeError: a worker brought weights that are not finite, and nothing was asked for that could leave it
                out. They have spread by then; the run must end without saving.
        """
        shard = self._shard
        assert shard is not None, "a round needs an anchor"
        clock = RoundClock()
        workers = dist.get_world_size(self.across)
        # Squared norms per unit: of every worker's pseudo-gradient, and in the last row of the common one.
        squares = torch.zeros(workers + 1, len(self.units), dtype=torch.float64, device=self._device)
        overlap = torch.zeros(2, dtype=torch.float64, device=self._device)
        with clock.measure("waiting"):
            arrival = torch.zeros((), device=self._device)
            dist.all_reduce(arrival, group=self.across)
            arrival.item()  # on a GPU the reduction has only been launched before
        flats = flattened(self.values)
        shard.prepare(overlap if self._observe else None)
        decisions = None
        if self.config.has_penalty or self.gta != GTAConfig():
            decisions = self._guarded_round(shard, flats, squares, clock)
        else:
            self._plain_round(shard, flats, squares, clock)
            self._sum_over_ranks(squares)
            self._refuse_broken(squares[:-1])
        shard.release()
        put_back(flats, self.values)
        if self._observe:
            self._sum_over_ranks(overlap)
        self.rounds += 1
        self.steps_since_sync = 0
        return self._report(squares, overlap, decisions or [], clock)

    def _plain_round(
        self, shard: OuterShard, flats: list[torch.Tensor], squares: torch.Tensor, clock: RoundClock
    ) -> None:
        """Step by the mean of all workers, segment by segment."""

        def combine(index: int, start: int, terms: list[torch.Tensor]) -> None:
            with clock.measure("applying"):
                shard.mean_step(self._number[index, start], terms, squares[:, self._segments[index].unit])

        buffers = (packed(segment, flats) for segment in self._segments)
        for segment, buffer in zip(self._segments, through_owners(buffers, self.across, combine), strict=True):
            unpack(segment, buffer, flats)

    def _guarded_round(
        self, shard: OuterShard, flats: list[torch.Tensor], squares: torch.Tensor, clock: RoundClock
    ) -> list[tuple[Verdict, float]]:
        """Decide over every unit from all workers' norms, then reduce, clip and step.

        The owners keep what they received until the norms over the whole model are known.

        Returns:
            For every unit the verdict, and by what its pseudo-gradient was multiplied.
        """
        memory = Memory()
        exchanges = [
            Exchange(index, packed(segment, flats), self.across, memory).start()
            for index, segment in enumerate(self._segments)
        ]
        arrived = [exchange.arrived() for exchange in exchanges]
        with clock.measure("applying"):
            for run, unit, terms in self._owned(arrived):
                shard.measure(run, terms, squares[:-1, unit])
        self._sum_over_ranks(squares)
        self._refuse_broken(squares[:-1])
        verdicts = self._penalty.decide(squares[:-1].sqrt().cpu())

        with clock.measure("applying"):
            for run, unit, terms in self._owned(arrived):
                shard.reduce(run, terms, verdicts[unit], squares[-1, unit], (self.rounds, run))
        self._sum_over_ranks(squares[-1])
        coefficients = [clip_coefficient(norm, self.config.clip_pseudo_grad) for norm in squares[-1].sqrt().tolist()]

        worker = dist.get_rank(self.across)
        with clock.measure("applying"):
            for run, unit, terms in self._owned(arrived):
                shard.step(run, terms[worker], coefficients[unit] if verdicts[unit].accepted else None)
        for exchange in exchanges:
            exchange.return_own()
        for segment, exchange in zip(self._segments, exchanges, strict=True):
            unpack(segment, exchange.finish(), flats)
        return list(zip(verdicts, coefficients, strict=True))

    def _owned(
        self, arrived: list[list[tuple[int, list[torch.Tensor]]]]
    ) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Yield (run, unit, terms) for every run that this rank owns."""
        for index, runs in enumerate(arrived):
            for start, terms in runs:
                yield self._number[index, start], self._segments[index].unit, terms

    def _sum_over_ranks(self, squares: torch.Tensor) -> None:
        """Add up squared norms over all owners and all ranks of a worker; the same bits everywhere."""
        dist.all_reduce(squares, group=self.across)
        dist.all_reduce(squares, group=self.inside)
        # Workers may have added in another order; what is decided by these numbers must not differ.
        dist.broadcast(squares, group=self.across, group_src=0)

    def _refuse_broken(self, squares: torch.Tensor) -> None:
        """Refuse workers whose weights are not finite, unless they are left out.

        Raises:
            RuntimeError: naming them and the units.
        """
        if self._penalty.tolerates_broken_workers:
            return
        broken = []
        for worker, by_unit in enumerate(squares.tolist()):
            units = [unit for unit, square in zip(self.units, by_unit, strict=True) if not math.isfinite(square)]
            if units:
                broken.append(f"worker {worker} had weights that are not finite in {listed(units)}")
        if broken:
            raise RuntimeError(
                f"outer round {self.rounds + 1}: {'; '.join(broken)}. The run ends here and saves nothing. Resume from "
                "the last checkpoint, with a lower learning rate or with the cause removed, or with "
                "--local-sgd-skip-anomaly to leave such workers out"
            )

    def _ranges(self, run: Run, counted: bool = False) -> list[tuple[int, int]]:
        """Return where the pieces of a run are, all of them or those that count in norms."""
        ranges = []
        offset = 0
        for piece in run.pieces:
            if not counted or self.synced_tensors[piece.index].counted:
                ranges.append((offset, offset + piece.numel))
            offset += piece.numel
        return ranges

    def _report(
        self,
        squares: torch.Tensor,
        overlap: torch.Tensor,
        decisions: Sequence[tuple[Verdict, float]],
        clock: RoundClock,
    ) -> RoundReport:
        """Return the report of the round that has just ended."""
        *by_worker, common = squares.tolist()
        workers = range(len(by_worker))
        sent = 0
        for segment in self._segments:
            first, last = self._own_bounds(segment)
            sent += segment.numel - (last - first) + (len(by_worker) - 1) * (last - first)
        decided = dict(zip(self.units, decisions, strict=False))
        norm = math.sqrt(math.fsum(common))
        scale = norm * math.sqrt(overlap[1])
        return RoundReport(
            round=self.rounds,
            pseudo_gradient_norm=norm,
            unit_norms={unit: math.sqrt(square) for unit, square in zip(self.units, common, strict=True)},
            worker_norms=[math.sqrt(math.fsum(norms)) for norms in by_worker],
            rejected={
                unit: sorted(set(workers) - set(verdict.accepted))
                for unit, (verdict, _) in decided.items()
                if len(verdict.accepted) < len(workers)
            },
            weights={
                unit: [dict(zip(verdict.accepted, verdict.weights, strict=True)).get(worker, 0.0) for worker in workers]
                for unit, (verdict, _) in decided.items()
            },
            clipped={unit: coefficient for unit, (_, coefficient) in decided.items() if coefficient != 1},
            cosine=float(overlap[0]) / scale if scale > 0 else None,
            bytes_sent=4 * sent,
            seconds=clock.seconds,
            waiting_seconds=clock.waiting,
            applying_seconds=clock.applying,
        )

    # State.

    @torch.no_grad()
    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Gather anchor and outer optimizer tensors from their owners; all ranks of `across` must call it.

        Returns:
            Lists by name, in the order and shapes of the values; empty in warm-up.
        """
        if self._shard is None:
            return {}
        parts = {"anchor": self._shard.anchors, **self._shard.optimizer.tensor_state()}
        return {name: self._gathered(owned) for name, owned in parts.items()}

    def gather_anchor(self) -> list[torch.Tensor]:
        """Return the anchor in the order and shapes of the values; all ranks of `across` must call it."""
        assert self._shard is not None, "there is no anchor in warm-up"
        return self._gathered(self._shard.anchors)

    def scalar_state(self) -> dict[str, Any]:
        """Return the counters, equal on all ranks."""
        return {
            "rounds": self.rounds,
            "steps_since_sync": self.steps_since_sync,
            "outer_scalars": {} if self._shard is None else self._shard.optimizer.scalar_state(),
            "penalty": self._penalty.state(),
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
            self._start(parts.pop("anchor")).optimizer.load(parts, scalars["outer_scalars"])
            self._penalty.load(scalars["penalty"])
        self.rounds = int(scalars["rounds"])
        self.steps_since_sync = int(scalars["steps_since_sync"])

    def _start(self, anchors: list[torch.Tensor]) -> OuterShard:
        """Begin an interval at these parts of the anchor."""
        self.steps_since_sync = 0
        self._shard = OuterShard(
            anchors,
            self._tensors,
            self._counted,
            optimizer=build_outer_optimizer(self.outer, anchors),
            reducer=build_reducer(self.gta),
            sparsifier=build_sparsifier(self.gta),
            worker=dist.get_rank(self.across),
        )
        return self._shard

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


def _collective_device(group: Any) -> torch.device:
    """Return a device whose tensors the group's backend can carry."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
