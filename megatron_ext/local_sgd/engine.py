# SPDX-License-Identifier: Apache-2.0
"""Local SGD on a list of fp32 tensors: the anchor, the schedule, and the outer round.

The engine knows tensors and a process group, not Megatron: it is given the authoritative fp32 values that this
rank owns (with the distributed optimizer its shard, so anchor, outer state and traffic are sharded too).

One round, as in DiLoCo (arXiv 2311.08105, Algorithm 1): the pseudo-gradient of worker i is anchor - theta_i; its
mean over the workers is the gradient of the outer optimizer, which moves the anchor; every worker goes on from
the new anchor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.config import LocalSGDConfig, OuterOptimizerConfig
from megatron_ext.local_sgd.digest import equal_across
from megatron_ext.local_sgd.outer_optimizer import (
    build_outer_optimizer,
    load_state,
    scalar_state,
    tensor_state,
)
from megatron_ext.transport.collectives import ordered_means

__all__ = ["LocalSGD", "RoundReport", "SyncedTensor", "partition"]

# Elements of one bucket: large enough for bandwidth, small enough that the outer step of one bucket overlaps the
# exchange of the next.
BUCKET_NUMEL = 1 << 21


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

    bytes_exchanged: int
    """Bytes of pseudo-gradient that this rank gave to the reduction."""

    seconds: float
    """Wall time of the round on this rank, waiting included."""


def partition(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the indices of `sizes` cut into runs whose sum is at most `limit`.

    An entry larger than the limit gets a run of its own, so every index occurs exactly once for any sizes and
    any limit.

    Args:
        sizes: numbers of elements, 0 or more.
        limit: at least 1.
    """
    runs: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not runs or size > room:
            runs.append([])
            room = limit
        runs[-1].append(index)
        room -= size
    return runs


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
        copies_cut_differently: bool = True,
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
            copies_cut_differently: whether two ranks may hold overlapping parts of one tensor that begin at
                different elements, as shards of tied embeddings on two pipeline stages do. The same on all ranks.
        """
        self.config = config
        self.outer = outer
        self.synced_tensors = tuple(synced)
        self.values = [entry.tensor for entry in synced]
        self.units = tuple(units)
        self.across = across
        self.inside = inside
        self._copies_cut_differently = copies_cut_differently
        self.anchors: list[torch.Tensor] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.rounds = 0
        self.steps_since_sync = 0
        self._unit_of = [self.units.index(entry.unit) for entry in synced]
        self._buckets = partition([value.numel() for value in self.values], BUCKET_NUMEL)
        self._device = self.values[0].device if self.values else _collective_device(inside)

    @property
    def synced(self) -> bool:
        """Whether all workers hold the same values now: in warm-up, or right after a round."""
        return self.anchors is None or self.steps_since_sync == 0

    def allocate_anchors(self) -> list[torch.Tensor]:
        """Make the anchors and the outer optimizer over them, with undefined contents, and return the anchors."""
        if self.anchors is None:
            # Contiguous like the pseudo-gradients: fused optimizers take for granted that both are laid out alike.
            self.anchors = [
                torch.empty_like(value, requires_grad=False, memory_format=torch.contiguous_format)
                for value in self.values
            ]
            self.optimizer = build_outer_optimizer(self.outer, self.anchors)
            if type(self.optimizer) is torch.optim.SGD and not self._copies_cut_differently:
                # One pass over memory instead of four; on a processor the passes are what a round costs. Its last
                # few elements are rounded otherwise than those before them, so parts of one tensor that are cut
                # differently would drift apart.
                self.optimizer.param_groups[0]["fused"] = True
        return self.anchors

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
                "start equal "
                "(check --data-parallel-random-init and any code of your own that changes weights per rank)"
            )
        for anchor, value in zip(self.allocate_anchors(), self.values, strict=True):
            anchor.copy_(value)
        self.steps_since_sync = 0

    def count_step(self) -> bool:
        """Count one inner step of all workers, skipped updates included; return whether a round is due."""
        self.steps_since_sync += 1
        return self.steps_since_sync >= self.config.local_sgd_sync_interval

    @torch.no_grad()
    def sync(self) -> RoundReport:
        """Run one outer round: collect, guard, reduce, outer step, apply.

        Raises:
            RuntimeError: a worker's weights are not finite; nothing was applied anywhere.
        """
        assert self.anchors is not None, "a round needs an anchor"
        start = time.perf_counter()
        self._guard()
        squares = torch.zeros(len(self.units), dtype=torch.float64, device=self._device)
        means = ordered_means(map(self._collect, self._buckets), self.across)
        for bucket, mean in zip(self._buckets, means, strict=True):
            self._apply(bucket, mean, squares)
        self.rounds += 1
        self.steps_since_sync = 0
        dist.all_reduce(squares, group=self.inside)
        by_unit = squares.tolist()
        return RoundReport(
            round=self.rounds,
            pseudo_gradient_norm=math.sqrt(math.fsum(by_unit)),
            unit_norms={unit: math.sqrt(square) for unit, square in zip(self.units, by_unit, strict=True)},
            bytes_exchanged=sum(value.numel() * value.element_size() for value in self.values),
            seconds=time.perf_counter() - start,
        )

    def _guard(self) -> None:
        """Refuse a round in which any worker brings values that are not finite."""
        bad = torch.zeros(len(self.units), device=self._device)
        for unit, value in zip(self._unit_of, self.values, strict=True):
            # The sum is finite unless a value is not, or the values are too large to be weights.
            bad[unit] += (~torch.isfinite(value.sum(dtype=torch.float32))).float()
        dist.all_reduce(bad, group=self.inside)
        verdicts = [torch.zeros_like(bad) for _ in range(dist.get_world_size(self.across))]
        dist.all_gather(verdicts, bad, group=self.across)
        broken = [
            f"worker {worker} has weights that are not finite in {_listed(self._units_above_zero(verdict))}"
            for worker, verdict in enumerate(verdicts)
            if float(verdict.sum()) > 0
        ]
        if broken:
            raise RuntimeError(
                f"outer round {self.rounds + 1}: {'; '.join(broken)}. The round was not applied. Resume from the "
                "last checkpoint, with a lower learning rate or with the cause removed"
            )

    def _units_above_zero(self, verdict: torch.Tensor) -> list[str]:
        return [unit for unit, count in zip(self.units, verdict.tolist(), strict=True) if count > 0]

    def _collect(self, bucket: list[int]) -> torch.Tensor:
        """Return one flat buffer with the bucket's pseudo-gradients.

        For a bucket of one value it is that value's own memory, so that no size of tensor asks for extra memory;
        until `_apply` the value then holds its pseudo-gradient.
        """
        assert self.anchors is not None
        first = self.values[bucket[0]]
        if len(bucket) == 1 and first.is_contiguous():
            return torch.sub(self.anchors[bucket[0]], first, out=first).view(-1)
        numel = sum(self.values[index].numel() for index in bucket)
        buffer = torch.empty(numel, dtype=torch.float32, device=self._device)
        for index, piece in self._pieces(bucket, buffer):
            torch.sub(self.anchors[index], self.values[index], out=piece)
        return buffer

    def _apply(self, bucket: list[int], mean: torch.Tensor, squares: torch.Tensor) -> None:
        """Move the bucket's anchors by the mean pseudo-gradient, and go on from there.

        Args:
            bucket: indices of values.
            mean: their mean pseudo-gradients, one after the other.
            squares: for each unit, to which the squared norm of the mean over the values that count is added.
        """
        assert self.anchors is not None
        for index, piece in self._pieces(bucket, mean):
            anchor = self.anchors[index]
            if self.synced_tensors[index].counted:
                squares[self._unit_of[index]] += piece.reshape(-1).dot(piece.reshape(-1))
            if self.optimizer is None:
                anchor.sub_(piece)
            else:
                anchor.grad = piece
        if self.optimizer is not None:
            self.optimizer.step()
        for index in bucket:
            anchor = self.anchors[index]
            anchor.grad = None
            self.values[index].copy_(anchor)

    def _pieces(self, bucket: list[int], buffer: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return (index, the part of `buffer` that belongs to it in its shape) for every value of a bucket."""
        pieces = []
        offset = 0
        for index in bucket:
            value = self.values[index]
            pieces.append((index, buffer[offset : offset + value.numel()].view(value.shape)))
            offset += value.numel()
        return pieces

    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Return anchor and outer optimizer tensors by name, in the order of the values; empty in warm-up."""
        if self.anchors is None:
            return {}
        return {"anchor": self.anchors, **tensor_state(self.optimizer, self.anchors)}

    def scalar_state(self) -> dict[str, Any]:
        """Return the counters, equal on all ranks."""
        return {
            "rounds": self.rounds,
            "steps_since_sync": self.steps_since_sync,
            "outer_scalars": scalar_state(self.optimizer, self.anchors or []),
        }

    def load(self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, Any]) -> None:
        """Take over a saved state.

        Args:
            tensors: as `tensor_state` returned them; `anchor` may be the list that `allocate_anchors` gave out.
            scalars: as `scalar_state` returned them.
        """
        self.rounds = int(scalars["rounds"])
        self.steps_since_sync = int(scalars["steps_since_sync"])
        if not tensors:
            return
        anchors = self.allocate_anchors()
        for anchor, loaded in zip(anchors, tensors["anchor"], strict=True):
            if anchor is not loaded:
                anchor.copy_(loaded)
        states = {name: values for name, values in tensors.items() if name != "anchor"}
        load_state(self.optimizer, anchors, states, scalars["outer_scalars"])


def _listed(names: Sequence[str], limit: int = 5) -> str:
    """Return names for a message, the first few of them when there are many."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more units" if rest > 0 else "")


def _collective_device(group: Any) -> torch.device:
    """Return a device whose tensors the group's backend can carry."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
