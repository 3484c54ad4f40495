# SPDX-License-Identifier: Apache-2.0
"""Seam: multi-latent attention, whose gradients Megatron does not add up over ranks, and cannot build locally."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.patching import Patch

__all__ = ["patches"]


def patches() -> tuple[Patch, ...]:
    """Return the patches of this seam, always the same objects; models without it are left as they are."""
    return _PATCHES


def _take_channels(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        original(self, config, *args, **kwargs)
        if v_channels is not None:
            # What the heads of this rank give; keys and queries are as wide as they come.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return init


def _gather_with_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def qkv_down_projection(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            gather_from_tensor_model_parallel_region,
            scatter_to_sequence_parallel_region,
        )

        query, common = original(self, hidden_states)
        latent, rotary = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        if common.size(-1) < latent + rotary:
            common = gather_from_tensor_model_parallel_region(common)
            if self.config.sequence_parallel:
                common = scatter_to_sequence_parallel_region(common)
        if self.config.sequence_parallel:
            # Megatron gathers the rotary part again, and adds up its gradients in doing so.
            return query, common
        parts = torch.split(common, [latent, rotary], dim=-1)
        return query, torch.cat([parts[0], copy_to_tensor_model_parallel_region(parts[1])], dim=-1)

    return qkv_down_projection


_PATCHES = (
    Patch(
        name="repairs/latent-attention-channels",
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        wrap=_take_channels,
        reason="Multi-latent attention tells its core attention the sizes of keys and values, for which Megatron's own "
        "has no arguments.",
        parameters=("config", "layer_number", "softmax_scale"),
    ),
    Patch(
        name="repairs/latent-attention-gradients",
        target="megatron.core.transformer.multi_latent_attention:MLASelfAttention._qkv_down_projection",
        wrap=_gather_with_gradients,
        reason="Without sequence parallelism every tensor-parallel rank has the rotary part of the keys for its own "
        "heads, but Megatron does not add up the gradients over the ranks.",
        parameters=("hidden_states",),
    ),
)
