# SPDX-License-Identifier: Apache-2.0
"""Layers that Megatron has the parts of and no option for, for its ``--spec megatron_ext.layer_specs NAME``.

Megatron imports this module when a command line names it; it needs no patch.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.training.models.gpt import default_layer_spec

__all__ = ["PlainQueryAttention", "plain_queries"]


class PlainQueryAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron is Any
    """Latent attention that normalises keys and values, and no queries: as DeepSeek's without ``q_lora_rank``.

    Since 0.19 Megatron has a norm for both or for none.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        # As if queries were projected down, which is what may be normalised or not; they are not, so no norm is built.
        with_rank = copy.copy(self.config)
        with_rank.q_lora_rank = self.config.kv_lora_rank
        both = replace(submodules, q_layernorm=submodules.kv_layernorm)
        found: dict[str, Any] = QKNormConfigResolver(with_rank, both).resolve()
        return {**found, "linear_q_proj": submodules.linear_q_proj, "q_layernorm": IdentityOp}


def plain_queries(config: Any, vp_stage: int | None = None) -> Any:
    """Return the layers that Megatron would take, with `PlainQueryAttention` in them.

    Args:
        config: Megatron's configuration of the model.
        vp_stage: which part of the rank's layers is meant, with virtual stages.

    Raises:
        ValueError: the model has no latent attention, or its queries are projected down.
    """
    if not config.transformer.multi_latent_attention or config.transformer.q_lora_rank is not None:
        raise ValueError("plain_queries is for --multi-latent-attention without --q-lora-rank")
    layers = default_layer_spec(config, vp_stage)
    for layer in getattr(layers, "layer_specs", [layers]):
        layer.submodules.self_attention.module = PlainQueryAttention
    return layers
