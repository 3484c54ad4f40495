# SPDX-License-Identifier: Apache-2.0
"""What Megatron's DDP sends in a step, by its own buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["ddp_buffers", "ddp_bytes"]


def ddp_buffers(model: Iterable[Any]) -> Iterator[Any]:
    """Yield the buffers in which DDP keeps parameters and gradients.

    Args:
        model: chunks, as DDP has wrapped them; of others there is none.
    """
    for chunk in model:
        # Of a module without DDP it is a method.
        yield from chunk.buffers if isinstance(chunk.buffers, list) else ()
        yield from getattr(chunk, "expert_parallel_buffers", ())


def ddp_bytes(model: Iterable[Any]) -> dict[str, int]:
    """Return the bytes that this rank sends in a step, by cause.

    A ring of n ranks sends (n - 1) / n of a buffer from each for a reduce-scatter or an all-gather, and twice that for
    an all-reduce.

    Args:
        model: chunks, as DDP has wrapped them.
    """
    sums: Counter[str] = Counter()
    for buffer in ddp_buffers(model):
        ranks = buffer.data_parallel_world_size
        gradients, parameters = buffer.grad_data.nbytes, 0
        if buffer.ddp_config.use_distributed_optimizer:
            parameters = buffer.param_data.nbytes
            sums[f"gradients (reduce-scatter, DP {ranks})"] += gradients * (ranks - 1) // ranks
            sums[f"parameters (all-gather, DP {ranks})"] += parameters * (ranks - 1) // ranks
        else:
            sums[f"gradients (all-reduce, DP {ranks})"] += 2 * gradients * (ranks - 1) // ranks
        instances = buffer.ddp_config.num_distributed_optimizer_instances
        if instances > 1:
            shard = gradients // ranks
            sums[f"gradients (all-reduce, {instances} optimizer instances)"] += 2 * shard * (instances - 1) // instances
    return dict(sums)
