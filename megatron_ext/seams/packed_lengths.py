# SPDX-License-Identifier: Apache-2.0
"""Seam: the lengths of documents that share samples, by which Megatron's log counts operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_ext.patching import Patch
from megatron_ext.seams.process_groups import current_groups, spans_workers

__all__ = ["patches"]


def patches() -> list[Patch]:
    """Return the patches of this seam, for runs whose data-parallel dimension is cut into workers."""
    return [
        Patch(
            name="packed-lengths/sum",
            target="megatron.training.training:consume_seqlen_stats_in_iteration",
            wrap=_wrap_consume,
            reason="Megatron adds up the lengths of packed documents over all ranks in every step, so over all workers",
        )
    ]


def _wrap_consume(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def consume_seqlen_stats_in_iteration() -> Any:
        from megatron.training import training

        groups = current_groups()
        if groups.num_workers == 1 or not spans_workers() or not training._seqlen_stats_active:
            return original()
        sums = training._seqlen_stats_in_iteration
        dist.all_reduce(sums, group=groups.inside)
        # A replica's ranks have all added the same. The other workers have as many samples, and nobody asks them how
        # long their documents are: it is for the log's count of operations alone.
        replicas = groups.dp.size() * groups.num_workers
        tokens, squares = (sums * (replicas / groups.inside.size())).tolist()
        sums.zero_()
        training._seqlen_stats_active = False
        return tokens, squares

    return consume_seqlen_stats_in_iteration
