# SPDX-License-Identifier: Apache-2.0
"""A worker of a Megatron job, as a rank sees it: its groups, the optimizer's values, and the engine of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.engine import LocalSGD, SyncedTensor
from megatron_ext.local_sgd.learning_rate import catch_up
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.params import ParameterView
from megatron_ext.params.router_biases import RouterBiases
from megatron_ext.seams.arguments import say
from megatron_ext.seams.optimizer import InnerValues
from megatron_ext.worker_groups import WorkerGroups

__all__ = ["Worker"]


class Worker:
    """What a rank of a worker has in common with the other workers' ranks in its place."""

    def __init__(
        self, args: Any, model: Sequence[Any], optimizer: Any, groups: WorkerGroups, *, observe: bool
    ) -> None:
        """Find the authoritative values of model and optimizer, and build the engine over them.

        Args:
            args: Megatron's argument namespace.
            model: the model chunks.
            optimizer: the `MegatronOptimizer`.
            groups: of the run.
            observe: whether rounds report what costs something to find out.
        """
        view = ParameterView.from_model(model)
        self.groups = groups
        self.values = InnerValues(optimizer, view)
        self._biases = RouterBiases(view)
        self.engine = LocalSGD(
            [
                SyncedTensor(
                    tensor=value.tensor,
                    name=value.entry.tensor.name,
                    unit=value.entry.unit,
                    counted=value.counts_once,
                    on_two_stages=value.entry.is_on_two_stages,
                )
                for value in self.values.values
            ],
            units=view.units(),
            config=LocalSGDConfig.from_args(args),
            outer=OuterOptimizerConfig.from_args(args),
            gta=GTAConfig.from_args(args),
            across=groups.across,
            inside=groups.inside,
            streaming=StreamingConfig.from_args(args),
            observe=observe,
        )

    @torch.no_grad()
    def make_equal(self) -> None:
        """Give every worker the weights of worker 0."""
        across = self.groups.across
        source = dist.get_process_group_ranks(across)[0]
        for tensor in self.values.tensors:
            dist.broadcast(tensor, src=source, group=across)
        self._biases.take_from_first(across)
        self.values.refresh(now=True)

    @torch.no_grad()
    def put(self, tensors: list[torch.Tensor]) -> None:
        """Train, or evaluate, with other values from now on.

        Args:
            tensors: fp32, one for each of `values`.
        """
        for value, tensor in zip(self.values.tensors, tensors, strict=True):
            value.copy_(tensor)
        self.values.refresh(now=True)

    def put_mean_biases(self) -> list[torch.Tensor]:
        """Give the routers of all workers the mean of their biases; return this worker's own."""
        own = self._biases.values()
        self._biases.take_mean(self.groups.across)
        return own

    def put_biases(self, values: list[torch.Tensor]) -> None:
        """Give the routers biases that `put_mean_biases` returned."""
        self._biases.put(values)

    def settle(self, scheduler: Any) -> None:
        """Make equal what rounds do not move, where workers have met: routers' biases, and the schedule's place.

        Args:
            scheduler: Megatron's, where workers may come to different places of the schedule; None otherwise.
        """
        self._biases.take_mean(self.groups.across)
        line = None if scheduler is None else catch_up(scheduler, self.groups.across, self.engine.device)
        if line is not None:
            say(line)
