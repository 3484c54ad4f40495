# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank, by cause: weights, gradients, optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_ext.explain.lone_rank import LoneRank, without_memory
from megatron_ext.explain.rank_figures import MemoryUse
from megatron_ext.params.ddp_traffic import ddp_buffers
from megatron_ext.params.optimizer_shards import optimizer_members, owned_parts

__all__ = ["memory_of", "state_bytes", "trained_elements"]


def memory_of(rank: LoneRank) -> list[MemoryUse]:
    """Return what a rank needs without what features add, activations aside."""
    held = [tensor for chunk in rank.model for tensor in (*chunk.parameters(), *_buffers(chunk))]
    gradients = [buffer.grad_data for buffer in ddp_buffers(rank.model)]
    return [
        MemoryUse(cause="weights", nbytes=_storage_bytes(held)),
        MemoryUse(cause="gradients", nbytes=_storage_bytes(gradients)),
        *_optimizer(rank),
    ]


def trained_elements(optimizer: Any) -> int:
    """Return how many elements a rank's optimizer updates."""
    return sum(stop - start for _, start, stop, _ in owned_parts(optimizer))


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of the inner optimizer's states, which it makes at its first step; scalars are left out."""
    found = 0
    with without_memory():
        for member in optimizer_members(optimizer):
            if member.init_state_fn is not None and not member.optimizer.state:
                member.init_state_fn(member.optimizer, member.config)
            for state in member.optimizer.state.values():
                tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
                found += sum(tensor.nbytes for tensor in tensors)
    return found


def _buffers(chunk: Any) -> list[torch.Tensor]:
    """Return the tensors of a chunk that are not parameters."""
    return [tensor for module in chunk.modules() for tensor in module._buffers.values() if tensor is not None]


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all memory that tensors lie in, each once: a buffer with its padding."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _optimizer(rank: LoneRank) -> Iterator[MemoryUse]:
    asked = rank.asked
    if asked.use_precision_aware_optimizer:
        trained = trained_elements(rank.optimizer)
        states = asked.exp_avg_dtype.itemsize + asked.exp_avg_sq_dtype.itemsize
        masters = trained * asked.main_params_dtype.itemsize
        yield MemoryUse(cause="master parameters", nbytes=masters, by_formula=True)
        yield MemoryUse(cause="optimizer states", nbytes=trained * states, by_formula=True)
        return
    away = asked.optimizer_offload_fraction if asked.optimizer_cpu_offload else 0.0
    for cause, nbytes in (
        ("fp32 master parameters", _master_bytes(rank.optimizer)),
        ("optimizer states", state_bytes(rank.optimizer)),
    ):
        yield MemoryUse(cause=cause, nbytes=round(nbytes * (1 - away)), by_formula=away > 0)
        if away > 0:
            yield MemoryUse(cause=cause, nbytes=round(nbytes * away), place="host", by_formula=True)


def _master_bytes(optimizer: Any) -> int:
    """Return the bytes of the values that the optimizer has beside the model's own."""
    found = 0
    for parameter, _, _, main in owned_parts(optimizer):
        if main is not None and main.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            found += main.nbytes
    return found
