# SPDX-License-Identifier: Apache-2.0
"""Seam: the lengths of documents that share samples, by which Megatron's log counts operations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.options.asked import packs_documents
from megatron_ext.patching import Patch
from megatron_ext.patching.bound_arguments import bound_with_defaults
from megatron_ext.run_options import run_options
from megatron_ext.seams.process_groups import current_groups, spans_workers
from megatron_ext.transport.collectives import collective_device

__all__ = ["patches"]


def patches() -> list[Patch]:
    """Return the patches of this seam, for runs whose data-parallel dimension is cut into workers."""
    return [
        Patch(
            name="packed-lengths/sum",
            target="megatron.training.training:consume_seqlen_stats_in_iteration",
            wrap=_wrap_consume,
            reason="Megatron adds up the lengths of packed documents over all ranks in every step, so over all workers",
        ),
        Patch(
            name="packed-lengths/save",
            target="megatron.training.checkpointing:save_checkpoint",
            wrap=_wrap_save,
            parameters=("num_floating_point_operations_so_far",),
            reason="workers count operations by the lengths of their own documents, and a checkpoint has one count",
        ),
    ]


def _wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        groups = current_groups()
        if groups.num_workers == 1 or not packs_documents(run_options()):
            return original(*args, **kwargs)
        bound = bound_with_defaults(signature, args, kwargs)
        count = bound.arguments["num_floating_point_operations_so_far"]
        common = torch.tensor([count], dtype=torch.float64, device=collective_device(groups.across))
        dist.broadcast(common, src=dist.get_process_group_ranks(groups.across)[0], group=groups.across)
        bound.arguments["num_floating_point_operations_so_far"] = type(count)(common.item())
        return original(*bound.args, **bound.kwargs)

    return save_checkpoint


def _wrap_consume(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def consume_seqlen_stats_in_iteration() -> Any:
        from megatron.training import training

        groups = current_groups()
        if groups.num_workers == 1 or not spans_workers() or not training._seqlen_stats_active:
            return original()
        sums = training._seqlen_stats_in_iteration
        dist.all_reduce(sums, group=groups.inside)
        # A replica's ranks have all added the same. Other workers have about as many samples, and nobody asks them how
        # long their documents are: it is for the log's count of operations alone.
        replicas = groups.dp.size() * groups.num_workers
        tokens, squares = (sums * (replicas / groups.inside.size())).tolist()
        sums.zero_()
        training._seqlen_stats_active = False
        return tokens, squares

    return consume_seqlen_stats_in_iteration
