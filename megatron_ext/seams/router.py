# SPDX-License-Identifier: Apache-2.0
"""Seam: the auxiliary losses of Megatron's routers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ext.hooks import WeighsExperts, hooks
from megatron_ext.patching import Patch

__all__ = ["metrics_apart", "padding_patches", "patches"]


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="router/load-balancing",
            target="megatron.core.transformer.moe.moe_utils:switch_load_balancing_loss_func",
            wrap=_wrap_loss,
            serves=(WeighsExperts.expert_weights,),
            parameters=("tokens_per_expert", "num_experts"),
            reason="let features weight the experts' token counts in the load-balancing losses",
        )
    ]


def padding_patches() -> list[Patch]:
    """Return the patches that make the losses right where rows have padding."""
    return [
        Patch(
            name="router/token-counts",
            target="megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
            wrap=_wrap_counts,
            parameters=("routing_map", "reduce_group", "topk", "with_padding_mask"),
            reason="weight the loss of a padded row alike on all tensor-parallel ranks, and that of an empty one by 0",
        ),
        Patch(
            name="router/bias-counts",
            target="megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
            wrap=_wrap_bias_counts,
            parameters=("routing_map", "padding_mask"),
            reason="Megatron 0.19 leaves padding out of the counts that move experts' biases by a mask of the wrong "
            "shape, and fails",
        ),
    ]


@contextmanager
def metrics_apart() -> Iterator[dict[str, Any]]:
    """Keep what routers report in here apart from what they report outside.

    Yields:
        a mapping that has, afterwards, the sums over this rank's micro-batches by name, each of shape (layers,).
    """
    from megatron.core.transformer.moe import moe_logging

    before, tracker = moe_logging.get_moe_metrics_tracker(), moe_logging.MoEMetricsTracker()
    found: dict[str, Any] = {}
    moe_logging.set_moe_metrics_tracker(tracker)
    try:
        yield found
    finally:
        moe_logging.set_moe_metrics_tracker(before)
        found.update({name: entry.values for name, entry in tracker.metrics.items()})


def _wrap_bias_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_expert_bias(self: Any, routing_map: Any, padding_mask: Any = None) -> None:
        if padding_mask is not None:
            padding_mask = padding_mask.view(-1, 1)
        original(self, routing_map, padding_mask=padding_mask)

    return apply_expert_bias


def _wrap_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_tokens_per_expert_and_token_count(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        per_expert, local, total = original(*args, **kwargs)
        if not bound.arguments["with_padding_mask"]:
            return per_expert, local, total
        # Sequence parallelism cuts a row without looking at where its padding lies, but every part is to weigh the
        # same. Of an empty row the loss would be 0 / 0.
        return per_expert, total / bound.arguments["reduce_group"].size(), total.clamp(min=1)

    return get_tokens_per_expert_and_token_count


def _wrap_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def switch_load_balancing_loss_func(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        counts, experts = bound.arguments["tokens_per_expert"], bound.arguments["num_experts"]
        weights = hooks.expert_weights(experts)
        if weights is not None:
            # The loss by sequence has the counts of all sequences, one after the other.
            repeated = weights.to(counts.device).repeat(counts.numel() // experts)
            bound.arguments["tokens_per_expert"] = counts * repeated
        return original(*bound.args, **bound.kwargs)

    return switch_load_balancing_loss_func
