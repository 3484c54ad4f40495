# SPDX-License-Identifier: Apache-2.0
"""The biases that routers keep for balancing without auxiliary loss.

No optimizer trains them. With `--moe-router-enable-expert-bias` Megatron moves each by a constant after every step,
towards experts with fewer tokens than the mean (arXiv 2408.15664); with quantile balancing it replaces them by a
quantile of the step's logits, or moves them towards it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.params.view import ParameterView

__all__ = ["RouterBiases"]


class RouterBiases:
    """The biases of this rank's routers; every rank of a worker holds those of its layers."""

    def __init__(self, view: ParameterView) -> None:
        """Find them.

        Args:
            view: of the model; its buffers are routers' biases.
        """
        self.entries = view.buffers
        for entry in self.entries:
            # A model in half precision has halved them; Megatron makes them fp32 in the first forward pass, too late
            # for values that come before it.
            entry.parameter.data = entry.parameter.data.float()

    @torch.no_grad()
    def take_mean(self, group: Any) -> None:
        """Give the routers of all ranks of a group the mean of their biases, summed up in the order of the ranks."""
        if not self.entries:
            return
        own = torch.cat([entry.parameter.detach() for entry in self.entries])
        all_of_them = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(all_of_them, own, group=group)
        self._put_one_behind_the_other(torch.stack(all_of_them).mean(dim=0))

    @torch.no_grad()
    def take_from_first(self, group: Any) -> None:
        """Give the routers of all ranks of a group the biases of its first rank."""
        if not self.entries:
            return
        common = torch.cat([entry.parameter.detach() for entry in self.entries])
        dist.broadcast(common, src=dist.get_process_group_ranks(group)[0], group=group)
        self._put_one_behind_the_other(common)

    def values(self) -> list[torch.Tensor]:
        """Return copies of the biases."""
        return [entry.parameter.detach().clone() for entry in self.entries]

    @torch.no_grad()
    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Give the routers of this rank biases, in the order of `values`."""
        for entry, value in zip(self.entries, values, strict=True):
            entry.parameter.copy_(value)

    def _put_one_behind_the_other(self, values: torch.Tensor) -> None:
        self.put(torch.split(values, [entry.parameter.numel() for entry in self.entries]))
