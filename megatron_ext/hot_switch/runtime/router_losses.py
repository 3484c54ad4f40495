# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of MoE routers in a run with several strategies: which there are, and how the log shows them.

Megatron adds their gradients to the model's, each micro-batch's mean times its predicted tokens, and divides by the
tokens of the step: so the loss of a step is the mean over its tokens, whichever strategy computed what.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["BALANCING", "Z_LOSS", "RouterReport", "reported_losses"]

BALANCING = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""Megatron's names, in reports, of the losses of `--moe-aux-loss-coeff`, by `--moe-router-load-balancing-type`."""

Z_LOSS = "z_loss"
"""Megatron's name of the loss of `--moe-z-loss-coeff` in reports."""


def reported_losses(config: Any) -> tuple[str, ...]:
    """Return the names of the auxiliary losses that a model has.

    Args:
        config: its `TransformerConfig`.
    """
    if config.num_moe_experts is None:
        return ()
    types, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if not isinstance(types, list):
        types, coefficients = [types], [coefficients]
    weights = dict(zip(types, coefficients, strict=True))
    balancing = [name for kind, name in BALANCING.items() if weights.get(kind)]
    return (*balancing, *([Z_LOSS] if config.moe_z_loss_coeff else []))


class RouterReport:
    """Adds up what the guests' routers report, and puts it into Megatron's report of home's.

    A reported loss is the mean over the micro-batches of all strategies that have tokens.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        """Prepare.

        Args:
            config: home's `TransformerConfig`.
            device: of the values.
        """
        self.names = reported_losses(config)
        self.layers = int(config.num_layers + (config.mtp_num_layers or 0))
        self._device = device
        self.start()

    def start(self) -> None:
        """Forget the last step."""
        self.sums = torch.zeros(len(self.names), self.layers, dtype=torch.float64, device=self._device)

    def add(self, values: Mapping[str, torch.Tensor], sharing: int) -> None:
        """Count what a guest's routers reported on this rank.

        Args:
            values: sums over micro-batches by name, shape (layers,).
            sharing: ranks that share a row of the guest's, tensor and context parallel. They hold parts of the
                balancing losses, which they add up, but means of the z loss over their parts of a row.
        """
        for number, name in enumerate(self.names):
            if name in values:
                self.sums[number] += values[name].double() / (sharing if name == Z_LOSS else 1)

    def finish(self, micro_batches: int, replicas: int) -> None:
        """Make Megatron's report, which is about home's micro-batches, one about those of all strategies.

        Args:
            micro_batches: those of all strategies that have tokens.
            replicas: home's, over which Megatron takes the mean.
        """
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        tracker = get_moe_metrics_tracker()
        # Megatron divides by the number of micro-batches that a replica of its own would have.
        scale = get_num_microbatches() / max(1, micro_batches)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        sharing = parallel_state.get_tensor_and_context_parallel_world_size()
        for number, name in enumerate(self.names):
            tracker.ensure_initialized(name, self.layers, self._device)
            values = tracker.metrics[name].values
            # Megatron adds up the values of all stages, and those of balancing losses of ranks that share rows.
            holders = stages * (1 if name == Z_LOSS else sharing)
            values.mul_(replicas * scale).add_((self.sums[number] * scale / holders).to(values.dtype))
