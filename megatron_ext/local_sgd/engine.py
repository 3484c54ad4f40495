# SPDX-License-Identifier: Apache-2.0
"""Local SGD on a list of fp32 tensors: the schedule of the rounds, and their state.

The engine knows tensors and process groups, not Megatron: it is given the authoritative fp32 values of this rank
(with the distributed optimizer its shard, so anchor, outer state and traffic are sharded too).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.config import GTAConfig, LocalSGDConfig, OuterOptimizerConfig
from megatron_ext.local_sgd.digest import equal_across
from megatron_ext.local_sgd.fragment import Fragment, SyncedTensor
from megatron_ext.local_sgd.report import RoundReport

__all__ = ["LocalSGD", "SyncedTensor"]


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
        self.rounds = 0
        self.steps_since_sync = 0
        self.in_warmup = True
        self._across = across
        self._device = self.values[0].device if self.values else _collective_device(across)
        self.fragment = Fragment(
            synced,
            units=units,
            config=config,
            outer=outer,
            gta=gta,
            across=across,
            inside=inside,
            device=self._device,
            observe=observe,
        )

    @property
    def synced(self) -> bool:
        """Whether all workers hold the same values now: in warm-up, or right after a round."""
        return self.in_warmup or self.steps_since_sync == 0

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Remember the present values, which must be equal on all workers, as the anchor; warm-up ends.

        Raises:
            RuntimeError: they are not equal, so that there is nothing for the workers to agree on.
        """
        if not equal_across(self.values, self._across, self._device):
            differs = (
                entry.name
                for entry in self.synced_tensors
                if not equal_across([entry.tensor], self._across, self._device)
            )
            raise RuntimeError(
                f"the workers' weights differ where the anchor is to be taken, first in {next(differs)}; they must "
                "start equal (check --data-parallel-random-init and any code of your own that changes weights per "
                "rank)"
            )
        self.in_warmup = False
        self.steps_since_sync = 0
        self.fragment.begin()

    def count_step(self) -> bool:
        """Count one inner step of all workers, skipped updates included; return whether a round is due."""
        self.steps_since_sync += 1
        return self.steps_since_sync >= self.config.local_sgd_sync_interval

    @torch.no_grad()
    def sync(self) -> RoundReport:
        """Run one outer round.

        Raises:
            RuntimeError: see `Fragment.sync`.
        """
        report = self.fragment.sync(self.rounds + 1)
        self.rounds += 1
        self.steps_since_sync = 0
        return report

    # State.

    @torch.no_grad()
    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Gather anchor and outer optimizer tensors from their owners; all ranks of `across` must call it.

        Returns:
            Lists by name, in the order and shapes of the values; empty in warm-up.
        """
        return {} if self.in_warmup else self.fragment.tensor_state()

    def worker_state(self) -> list[torch.Tensor]:
        """Return what this worker alone has beside its values, in their order and shapes: its residuals."""
        return self.fragment.worker_state()

    @torch.no_grad()
    def gather_anchor(self) -> list[torch.Tensor]:
        """Return the values that all workers agreed on last, like the values; all ranks of `across` must call it."""
        return self.fragment.gather_anchor()

    def scalar_state(self) -> dict[str, Any]:
        """Return the counters and what else is equal on all ranks."""
        return {
            "rounds": self.rounds,
            "steps_since_sync": self.steps_since_sync,
            "fragment": {} if self.in_warmup else self.fragment.scalar_state(),
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
            self.in_warmup = False
            self.fragment.load(tensors, scalars["fragment"], own)
        self.rounds = int(scalars["rounds"])
        self.steps_since_sync = int(scalars["steps_since_sync"])


def _collective_device(group: Any) -> torch.device:
    """Return a device whose tensors the group's backend can carry."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
