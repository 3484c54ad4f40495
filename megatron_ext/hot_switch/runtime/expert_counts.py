# SPDX-License-Identifier: Apache-2.0
"""Tokens that experts get under all strategies, for the biases by which home's routers balance them.

Guests route by home's biases, which move with the parameters and stay as they are while guests train. At the end of the
step Megatron moves home's by the tokens that home's routers have counted, and so by those of all strategies when the
guests' counts are among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.hot_switch.runtime.placed_model import PlacedModel

__all__ = ["ExpertCounts"]


class ExpertCounts:
    """Counts in guests' turns, until home has them."""

    def __init__(self, home: PlacedModel, group: Any) -> None:
        """Prepare.

        Args:
            home: the model that Megatron trains.
            group: process group of the ranks that share the strategies.
        """
        self._home = home
        self._group = group
        self.active = bool(home.config.moe_router_enable_expert_bias)
        shape = home.view.shape
        layers = shape.num_layers + shape.mtp_num_layers
        self._sums = torch.zeros(layers, shape.num_moe_experts or 0, device=home.device)

    def start(self) -> None:
        """Forget the last step."""
        self._sums.zero_()

    @torch.no_grad()
    def take(self, guest: PlacedModel) -> None:
        """Take what a guest's routers have counted on this rank in their turn."""
        for router in _counting_routers(guest):
            if guest.counts_positions:
                self._sums[_place(router)] += router.local_tokens_per_expert
            router.local_tokens_per_expert.zero_()

    @torch.no_grad()
    def give(self) -> None:
        """Add the guests' counts to home's. All ranks must call it, before Megatron adds up home's over its ranks."""
        dist.all_reduce(self._sums, group=self._group)
        if not self._home.adds_for_all:
            return
        for router in _counting_routers(self._home):
            # Where tensor-parallel ranks route the same positions, all of them count, for home and here.
            if self._home.counts_positions or not self._home.strategy.sequence_parallel:
                router.local_tokens_per_expert += self._sums[_place(router)]


def _place(router: Any) -> int:
    """Return the number of a router's layer; layers for multi-token prediction follow those of the decoder."""
    return int(router.layer_number - 1 + (router.config.num_layers if router.is_mtp_layer else 0))


def _counting_routers(model: PlacedModel) -> Iterator[Any]:
    for chunk in model.chunks:
        for module in chunk.modules():
            if getattr(module, "local_tokens_per_expert", None) is not None:
                yield module
