# SPDX-License-Identifier: Apache-2.0
"""Seam: the authoritative fp32 values inside Megatron's optimizers, and refreshing the model from them.

Which tensor is authoritative depends on the optimizer: the model's own parameter (fp32), its fp32 copy (bf16 and
fp16), or this rank's shard of that copy (distributed optimizer). Nothing here is a patch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["InnerValues", "Value", "is_distributed"]


@dataclass(frozen=True, kw_only=True)
class Value:
    """One authoritative tensor of this rank."""

    tensor: torch.Tensor
    """fp32; 1-D for a shard of the distributed optimizer, else in the shape of the parameter. Detached, and
    sharing memory with what the inner optimizer updates."""

    parameter: torch.nn.Parameter
    """The model parameter that it stands for."""

    member: int
    """Index of its optimizer in `InnerValues.members`."""

    counted: bool
    """Whether it counts in norms over the worker: not a tensor-parallel replica, not a tied copy."""


class InnerValues:
    """The values of one rank, in an order that is the same on all ranks with the same shard."""

    def __init__(self, optimizer: Any) -> None:
        """Find the values.

        Args:
            optimizer: the `MegatronOptimizer` of this rank.

        Raises:
            TypeError: one of its members is of a kind whose authoritative values are not known.
        """
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        self.members = [member for member in chained if not getattr(member, "is_stub_optimizer", False)]
        self.values = [
            Value(tensor=main.detach(), parameter=parameter, member=index, counted=_counts(parameter))
            for index, member in enumerate(self.members)
            for parameter, main in _pairs(member)
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The authoritative tensors."""
        return [value.tensor for value in self.values]

    @torch.no_grad()
    def refresh(self, now: bool = False) -> None:
        """Bring the model's parameters up to date after the values were changed.

        Args:
            now: gather the distributed optimizer's shards at once. Otherwise, with overlapped gathering, the
                next forward pass does it, as after any optimizer step.
        """
        for member in self.members:
            if hasattr(member, "_copy_main_params_to_model_params"):
                member._copy_main_params_to_model_params()
            if not is_distributed(member):
                continue
            if now:
                for chunk in member.model_chunks:
                    chunk.start_param_sync(force_sync=True)
            elif not member.ddp_config.overlap_param_gather:
                member.start_param_sync_for_bucket_group_subset()


def is_distributed(member: Any) -> bool:
    """Return whether an optimizer shards its state over the data-parallel ranks."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(member, DistributedOptimizer)


def _pairs(member: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield (model parameter, authoritative tensor) of one optimizer."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    groups = member.optimizer.param_groups
    if is_distributed(member):
        for parameter, (group, order) in member.model_param_group_index_map.items():
            yield parameter, groups[group]["params"][order]
    elif isinstance(member, Float16OptimizerWithFloat16Params):
        halves = zip(member.float16_groups, member.fp32_from_float16_groups, strict=True)
        for parameters, mains in halves:
            yield from zip(parameters, mains, strict=True)
        for parameters in member.fp32_from_fp32_groups:
            yield from zip(parameters, parameters, strict=True)
    elif isinstance(member, FP32Optimizer):
        for group in groups:
            yield from zip(group["params"], group["params"], strict=True)
    else:
        raise TypeError(f"the authoritative fp32 values of a {type(member).__name__} are not known")


def _counts(parameter: torch.nn.Parameter) -> bool:
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter))
