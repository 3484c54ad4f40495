# SPDX-License-Identifier: Apache-2.0
"""What a training really holds in memory: the counterpart of what `training_bytes` says that it needs."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ext.params import ParameterView
from megatron_ext.seams.optimizer import InnerValues
from megatron_ext.spes.spared_memory import TrainingBytes

__all__ = ["held_bytes"]


def held_bytes(model: list[Any], optimizer: Any) -> TrainingBytes:
    """Return the bytes that this rank holds, after a step, which makes the optimizers' states.

    Args:
        model: the model chunks, wrapped in DDP.
        optimizer: the `MegatronOptimizer`.

    Returns:
        Bytes of the weights; of the gradient buffers with their padding, which the distributed optimizer needs; and of
        what the optimizer keeps for every element: its moments, and fp32 masters where the weights are of another type.
        Counters of steps, one per tensor, are left out.
    """
    values = InnerValues(optimizer, ParameterView.from_model(model))
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    masters = [value.tensor for value in values.values if value.entry.parameter.dtype != torch.float32]
    moments = [
        moment
        for member in values.members
        for state in member.optimizer.state.values()
        for moment in state.values()
        if isinstance(moment, torch.Tensor) and moment.dim() > 0
    ]
    return TrainingBytes(
        weights=sum(entry.parameter.nbytes for entry in values.view.entries),
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        optimizer=sum(tensor.nbytes for tensor in (*masters, *moments)),
    )
