# SPDX-License-Identifier: Apache-2.0
"""Seam: the gradients that a worker has reduced, and reducing them over the workers as well (warm-up)."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.params.fsdp_shards import local_part
from megatron_ext.patching import Patch
from megatron_ext.patching.bound_arguments import bound_with_defaults
from megatron_ext.seams.process_groups import WorkerParallelState, current_groups, whole_groups
from megatron_ext.transport.collectives import collective_device, ordered_sum
from megatron_ext.worker_groups import WorkerGroups

__all__ = ["forget_synchronous_warmup", "install_synchronous_warmup", "patches", "reduced_gradients"]

_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer"

_warmup: tuple[WorkerGroups, Callable[[], bool]] | None = None
"""The groups of the run, and whether gradients are synchronous over all workers in this step."""


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="gradients/norm",
            target="megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
            wrap=_wrap_norm,
            parameters=("grads_for_norm", "norm_type", "grad_stats_parallel_group"),
            reason="clip the same gradients alike on all workers in warm-up, though each adds up their norm by itself, "
            "and add up those of a layer-wise optimizer, for which Megatron takes all ranks, inside the worker",
        ),
        Patch(
            name="gradients/zeros",
            target="megatron.core.optimizer.clip_grads:count_zeros_fp32",
            wrap=_wrap_zeros,
            parameters=("parameters", "grad_stats_parallel_group"),
            reason="Megatron counts a layer-wise optimizer's zeros over all ranks, so over all workers",
        ),
        Patch(
            name="gradients/logits",
            target="megatron.core.optimizer.qk_clip:parallel_state",
            wrap=_ThoseThatStepTogether,
            rebind=False,
            reason="clip weights by the attention logits of the ranks that make this step together",
        ),
        Patch(
            name="gradients/norm-groups",
            target=f"{_LAYER_WISE}.has_grad_norm_group",
            wrap=_wrap_has_group,
            parameters=("self", "grad_norm_group"),
            missing_from="<0.19",
            dispensable=True,
            rebind=False,
            reason="ask the ranks of a worker alone which gradients a layer-wise optimizer clips apart",
        ),
    ]


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
        # Gradients may be divided by the number of tokens: of all workers here, so that their sum below is the gradient
        # per token of the whole batch, however unequal the workers' token counts are.
        pg_collection = _over_all_workers(pg_collection, config, of_tokens=num_tokens is not None)
        inner(model, num_tokens, pg_collection=pg_collection, **kwargs)
        _sum_over_workers(model, groups, average=num_tokens is None)

    config.finalize_model_grads_func = finalize

    global _warmup
    _warmup = groups, in_warmup


def forget_synchronous_warmup() -> None:
    """Let go of the groups and the model of a former run in this process."""
    global _warmup
    _warmup = None


def _groups_of_synchronous_step() -> WorkerGroups | None:
    """Return the groups of the run if all workers make this step together."""
    return _warmup[0] if _warmup is not None and _warmup[1]() else None


class _ThoseThatStepTogether(WorkerParallelState):
    """`parallel_state` as a worker sees it, and in warm-up, where all workers make the same step, as it is."""

    def _groups(self) -> WorkerGroups:
        return super()._groups() if _groups_of_synchronous_step() is None else whole_groups(self._full)


@torch.no_grad()
def _of_first_worker(groups: WorkerGroups, norm: Any) -> Any:
    """Return the first worker's norm, a number or a tensor as it was given."""
    device = collective_device(groups.across)
    common = torch.as_tensor(norm, device=device, dtype=torch.float64).reshape(1).clone()
    dist.broadcast(common, src=dist.get_process_group_ranks(groups.across)[0], group=groups.across)
    return common.to(norm.dtype).reshape(norm.shape) if isinstance(norm, torch.Tensor) else float(common)


def _wrap_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    inside = _inside_the_worker(original)

    @functools.wraps(original)
    def get_grad_norm_fp32(*args: Any, **kwargs: Any) -> Any:
        norm, together = inside(*args, **kwargs), _groups_of_synchronous_step()
        return norm if together is None else _of_first_worker(together, norm)

    return get_grad_norm_fp32


def _wrap_zeros(original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(original)(_inside_the_worker(original))


def _inside_the_worker(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes the worker's ranks where `original` would take all of the job's."""
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = bound_with_defaults(signature, args, kwargs)
        if bound.arguments["grad_stats_parallel_group"] is None:
            bound.arguments["grad_stats_parallel_group"] = current_groups().inside
        return original(*bound.args, **bound.kwargs)

    return call


def _wrap_has_group(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def has_grad_norm_group(self: Any, grad_norm_group: str) -> bool:
        from megatron.core.optimizer.optimizer import _get_param_grad_norm_group

        known: dict[str, bool] = self.__dict__.setdefault("_norm_groups_of_worker", {})
        if grad_norm_group not in known:
            own = any(_get_param_grad_norm_group(parameter) == grad_norm_group for parameter in self.get_parameters())
            groups = current_groups()
            flag = torch.tensor(int(own), device=collective_device(groups.inside))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=groups.inside)
            known[grad_norm_group] = bool(flag)
        return known[grad_norm_group]

    return has_grad_norm_group


def reduced_gradients(model: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the 1-D gradient slices that this rank's optimizer reads, one per bucket, after the inner reduction.

    With the distributed optimizer that is this rank's shard of each bucket, else, and where the gradients of this step
    are dumped, the whole bucket; with FSDP2, which has no buckets, this rank's rows of each gradient.
    """
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    for chunk in model:
        if isinstance(chunk, TorchFullyShardedDataParallel):
            yield from _gradients_of_rows(chunk)
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for bucket in buffer.buckets:
                gradient = bucket.grad_data.view(-1)
                if chunk.ddp_config.use_distributed_optimizer and not chunk.force_all_reduce:
                    group = buffer.data_parallel_group
                    gradient = shard_buffer(gradient, group.size())[group.rank()]
                yield gradient


def _gradients_of_rows(chunk: Any) -> Iterator[torch.Tensor]:
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # of what this worker's batch did not use, and another's may have
                parameter.grad = torch.zeros_like(parameter)
            yield local_part(parameter.grad).view(-1)


@torch.no_grad()
def _sum_over_workers(model: list[Any], groups: WorkerGroups, average: bool) -> None:
    for gradient in reduced_gradients(model):
        ordered_sum(gradient, groups.across)
        if average:
            gradient.div_(groups.num_workers)


def _over_all_workers(collection: Any, config: Any, *, of_tokens: bool) -> Any:
    """Return a copy of a process-group collection whose groups that count something span all workers.

    Args:
        collection: a worker's.
        config: says whether routers count the tokens of experts, or take quantiles of their logits.
        of_tokens: whether tokens are counted.
    """
    from megatron.core import parallel_state

    wide = copy.copy(collection)
    if of_tokens or config.moe_router_load_balancing_type == "quantile_balancing":
        wide.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        wide.dp_cp_gtp_remat = wide.dp_cp
    if config.moe_router_enable_expert_bias:
        wide.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return wide
