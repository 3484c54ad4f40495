# SPDX-License-Identifier: Apache-2.0
"""Seam: the load-balancing loss of Megatron's routers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_ext.hooks import hooks
from megatron_ext.patching import Patch

__all__ = ["patches"]


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="router/load-balancing",
            target="megatron.core.transformer.moe.moe_utils:switch_load_balancing_loss_func",
            wrap=_wrap_loss,
            parameters=("tokens_per_expert", "num_experts"),
            reason="let features weight the experts' token counts in the load-balancing losses",
        )
    ]


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
