# SPDX-License-Identifier: Apache-2.0
"""Seam: the gradients that a worker has reduced, and reducing them over the workers as well (warm-up)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ext.seams.process_groups import WorkerGroups
from megatron_ext.transport.collectives import ordered_sum

__all__ = ["install_synchronous_warmup", "reduced_gradients"]


def install_synchronous_warmup(config: Any, groups: WorkerGroups, in_warmup: Callable[[], bool]) -> None:
    """Make gradients synchronous over all workers for as long as `in_warmup()` says so.

    Uses the hook that Megatron offers, `config.finalize_model_grads_func`.

    Args:
        config: the `TransformerConfig` that the schedules read.
        groups: the groups of this run.
        in_warmup: asked at every step.
    """
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    inner = config.finalize_model_grads_func or finalize_model_grads

    @functools.wraps(inner)
    def finalize(
        model: list[Any],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        if not in_warmup():
            inner(model, num_tokens, pg_collection=pg_collection, **kwargs)
            return
        if num_tokens is not None:
            # Gradients are divided by the number of tokens: of all workers here, so that their sum below is
            # the gradient per token of the whole batch, however unequal the workers' token counts are.
            pg_collection = _over_all_workers(pg_collection)
        inner(model, num_tokens, pg_collection=pg_collection, **kwargs)
        _sum_over_workers(model, groups, average=num_tokens is None)

    config.finalize_model_grads_func = finalize


def reduced_gradients(model: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the 1-D gradient slices that this rank's optimizer reads, one per bucket, after the inner reduction.

    With the distributed optimizer that is this rank's shard of each bucket, else the whole bucket.
    """
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    for chunk in model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for bucket in buffer.buckets:
                gradient = bucket.grad_data.view(-1)
                if chunk.ddp_config.use_distributed_optimizer:
                    group = buffer.data_parallel_group
                    gradient = shard_buffer(gradient, group.size())[group.rank()]
                yield gradient


@torch.no_grad()
def _sum_over_workers(model: list[Any], groups: WorkerGroups, average: bool) -> None:
    for gradient in reduced_gradients(model):
        ordered_sum(gradient, groups.across)
        if average:
            gradient.div_(groups.num_workers)


def _over_all_workers(collection: Any) -> Any:
    """Return a copy of a process-group collection whose data-parallel groups span all workers."""
    from megatron.core import parallel_state

    wide = copy.copy(collection)
    wide.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    wide.dp_cp_gtp_remat = wide.dp_cp
    return wide
