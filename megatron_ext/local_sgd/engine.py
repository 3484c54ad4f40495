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

from megatron_ext.local_sgd.compression import CompressedRound
from megatron_ext.local_sgd.config import GTAConfig, LocalSGDConfig, OuterOptimizerConfig
from megatron_ext.local_sgd.digest import equal_across
from megatron_ext.local_sgd.judge import Judge
from megatron_ext.local_sgd.outer_optimizer import build_outer_optimizer
from megatron_ext.local_sgd.packing import flattened, packed, put_back, unpack
from megatron_ext.local_sgd.penalty import Penalty
from megatron_ext.local_sgd.reducers import build_reducer, build_sparsifier
from megatron_ext.local_sgd.report import RoundClock, RoundReport
from megatron_ext.local_sgd.rounds import Decision, GuardedRound, OwnedRuns, PlainRound, Round, RoundState
from megatron_ext.local_sgd.segments import Run, plan_segments
from megatron_ext.local_sgd.shard import OuterShard
from megatron_ext.transport.codecs import build_codec
from megatron_ext.transport.collectives import SEGMENT_NUMEL, Buffer, from_owners, runs_within

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
            inside: process group of all ranks of this worker; None when it is this one alone.
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
        self._shard: OuterShard | None = None
        self._penalty = Penalty(config, workers=dist.get_world_size(across), units=len(self.units))
        self._judge = Judge(self._penalty, self.units, clip=config.clip_pseudo_grad, across=across, inside=inside)
        segments = plan_segments(
            [value.numel() for value in self.values],
            [self.units.index(entry.unit) for entry in synced],
            limit=SEGMENT_NUMEL,
            small=SMALL_NUMEL,
        )
        self._owned = OwnedRuns(segments, across)
        self._compressed: CompressedRound | None = None
        if config.codec is not None:
            # What topk chose on the way out differs from worker to worker; on the way home all of it should fit.
            union = min(1.0, config.codec_density * self._owned.workers)
            self._compressed = CompressedRound(
                self._owned,
                self._judge,
                outward=build_codec(config.codec, config.codec_density),
                homeward=build_codec(config.codec, union),
            )
        self._round: Round
        if self._compressed is not None:
            self._round = self._compressed
        elif config.has_penalty or gta != GTAConfig():
            self._round = GuardedRound(self._owned, self._judge)
        else:
            self._round = PlainRound(self._owned, self._judge)
        self._device = self.values[0].device if self.values else _collective_device(across)

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
        if self._compressed is not None:
            self._compressed.start(self.values)

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
        with clock.measure("waiting"):
            arrival = torch.zeros((), device=self._device)
            dist.all_reduce(arrival, group=self.across)
            arrival.item()  # on a GPU the reduction has only been launched before
        overlap = torch.zeros(2, dtype=torch.float64, device=self._device)
        state = RoundState(
            number=self.rounds + 1,
            shard=shard,
            flats=flattened(self.values),
            squares=torch.zeros(self._owned.workers + 1, len(self.units), dtype=torch.float64, device=self._device),
            clock=clock,
        )
        shard.prepare(overlap if self._observe else None)
        decisions = self._round.run(state)
        shard.release()
        put_back(state.flats, self.values)
        if self._observe:
            self._judge.add_up(overlap)
        self.rounds += 1
        self.steps_since_sync = 0
        return self._report(state, overlap, decisions)

    def _ranges(self, run: Run, counted: bool = False) -> list[tuple[int, int]]:
        """Return where the pieces of a run are, all of them or those that count in norms."""
        ranges = []
        offset = 0
        for piece in run.pieces:
            if not counted or self.synced_tensors[piece.index].counted:
                ranges.append((offset, offset + piece.numel))
            offset += piece.numel
        return ranges

    def _report(self, state: RoundState, overlap: torch.Tensor, decisions: Sequence[Decision]) -> RoundReport:
        """Return the report of the round that has just ended."""
        *by_worker, common = state.squares.tolist()
        workers = range(len(by_worker))
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
            bytes_sent=self._round.bytes_sent,
            seconds=state.clock.seconds,
            waiting_seconds=state.clock.waiting,
            applying_seconds=state.clock.applying,
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
        state = {name: self._gathered(owned) for name, owned in parts.items()}
        if self._compressed is not None:
            state["replica"] = self._compressed.replicas
        return state

    def worker_state(self) -> list[torch.Tensor]:
        """Return what this worker alone has beside its values, in their order and shapes: its residuals."""
        return [] if self._compressed is None else self._compressed.residuals

    def gather_anchor(self) -> list[torch.Tensor]:
        """Return the values that all workers agreed on last, like the values; all ranks of `across` must call it."""
        assert self._shard is not None, "there is no anchor in warm-up"
        if self._compressed is not None:
            return [replica.clone() for replica in self._compressed.replicas]
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
    def load(
        self,
        tensors: dict[str, list[torch.Tensor]],
        scalars: dict[str, Any],
        own: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Take over a saved state.

        Args:
            tensors: as `tensor_state` returned them, perhaps with another number of workers.
            scalars: as `scalar_state` returned them.
            own: as `worker_state` returned it.
        """
        if tensors:
            common = {name: values for name, values in tensors.items() if name != "replica"}
            if self._compressed is not None:
                self._compressed.start(tensors["replica"], own)
            parts = {name: self._own_parts(values) for name, values in common.items()}
            self._start(parts.pop("anchor")).optimizer.load(parts, scalars["outer_scalars"])
            self._penalty.load(scalars["penalty"])
        self.rounds = int(scalars["rounds"])
        self.steps_since_sync = int(scalars["steps_since_sync"])

    def _start(self, anchors: list[torch.Tensor]) -> OuterShard:
        """Begin an interval at these parts of the anchor."""
        self.steps_since_sync = 0
        self._shard = OuterShard(
            anchors,
            [self._ranges(run) for _, run in self._owned.numbered],
            [self._ranges(run, counted=True) for _, run in self._owned.numbered],
            optimizer=build_outer_optimizer(self.outer, anchors),
            reducer=build_reducer(self.gta),
            sparsifier=build_sparsifier(self.gta),
            worker=self._owned.worker,
            terms_are_gradients=self._compressed is not None,
        )
        return self._shard

    def _own_parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of this rank's runs of `tensors`, which are like the values."""
        flats = flattened(tensors)
        return [
            run.clone()
            for segment in self._owned.segments
            for run in runs_within(packed(segment, flats), *self._owned.bounds(segment)[self._owned.worker])
        ]

    def _gathered(self, owned: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors like the values, put together from the runs that the workers own."""
        tensors = [torch.empty(value.shape, dtype=torch.float32, device=value.device) for value in self.values]
        flats = flattened(tensors)

        def buffers() -> Iterator[Buffer]:
            rest = iter(owned)
            for segment in self._owned.segments:
                buffer = packed(segment, flats)
                for run in runs_within(buffer, *self._owned.bounds(segment)[self._owned.worker]):
                    run.copy_(next(rest))
                yield buffer

        for segment, buffer in zip(self._owned.segments, from_owners(buffers(), self.across), strict=True):
            unpack(segment, buffer, flats)
        return tensors


def _collective_device(group: Any) -> torch.device:
    """Return a device whose tensors the group's backend can carry."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
