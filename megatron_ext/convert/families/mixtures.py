# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts with ordinary attention: Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from megatron_ext.convert.families.config_fields import ConfigFields
from megatron_ext.convert.families.dense import no_window
from megatron_ext.convert.families.family import common_config, common_settings
from megatron_ext.convert.hf_names import Names
from megatron_ext.convert.settings import ModelSettings

__all__ = ["Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe"]


class Mixtral:
    """Mixtral: every layer has experts, and the softmax is over those chosen."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    names = Names(
        router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate="w1", up="w3", down="w2"
    )
    predicts = False

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        fields.must_be("sliding_window", None)
        fields.must_be("router_jitter_noise", 0.0, None)
        common = common_settings(fields)
        return ModelSettings(
            num_experts=fields.size("num_local_experts"),
            moe_ffn_hidden_size=common["ffn_hidden_size"],
            moe_router_topk=fields.size("num_experts_per_tok"),
            moe_aux_loss_coeff=fields.take("router_aux_loss_coef", 0.0),
            **common,
        )

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        return {
            **common_config(settings),
            # No layer is dense, so that this is the experts' width.
            "intermediate_size": settings.moe_ffn_hidden_size or settings.ffn_hidden_size,
            "num_local_experts": settings.num_experts or 0,
            "num_experts_per_tok": settings.moe_router_topk,
            "router_aux_loss_coef": settings.moe_aux_loss_coeff,
            "sliding_window": None,
        }


class Olmoe:
    """OLMoE: every layer has experts, and queries and keys are normalised over all heads at once."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    names = Names()
    predicts = False

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        fields.must_be("attention_bias", False)
        fields.must_be("clip_qkv", None)
        common = common_settings(fields)
        return ModelSettings(
            qk_layernorm=True,
            qk_norm_over_heads=True,
            num_experts=fields.size("num_experts"),
            moe_ffn_hidden_size=common["ffn_hidden_size"],
            moe_router_topk=fields.size("num_experts_per_tok"),
            # Normalised afterwards, a softmax over all is one over those chosen.
            moe_router_pre_softmax=not fields.need("norm_topk_prob", False),
            moe_aux_loss_coeff=fields.take("router_aux_loss_coef", 0.0),
            **common,
        )

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        config = common_config(settings)
        del config["head_dim"]
        return {
            **config,
            # No layer is dense, so that this is the experts' width.
            "intermediate_size": settings.moe_ffn_hidden_size or settings.ffn_hidden_size,
            "attention_bias": False,
            "clip_qkv": None,
            "num_experts": settings.num_experts or 0,
            "num_experts_per_tok": settings.moe_router_topk,
            "norm_topk_prob": not settings.moe_router_pre_softmax,
            "router_aux_loss_coef": settings.moe_aux_loss_coeff,
        }


class Qwen3Moe:
    """Qwen 3's mixtures: some layers may be dense; queries and keys are normalised, head by head."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    names = Names()
    predicts = False

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        no_window(fields)
        fields.must_be("attention_bias", False)
        fields.must_have("head_dim")
        return ModelSettings(qk_layernorm=True, **_experts(fields), **common_settings(fields))

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        return {**common_config(settings), **_expert_fields(settings), "attention_bias": False}


class Qwen2Moe:
    """Qwen 1.5 and 2's mixtures: a gated shared expert; queries, keys and values have a bias."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    names = Names()
    predicts = False

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        no_window(fields)
        fields.must_be("qkv_bias", True)
        return ModelSettings(
            add_qkv_bias=True,
            moe_shared_expert_intermediate_size=fields.size("shared_expert_intermediate_size"),
            moe_shared_expert_gate=True,
            **_experts(fields),
            **common_settings(fields),
        )

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        return {
            **common_config(settings),
            **_expert_fields(settings),
            "shared_expert_intermediate_size": settings.moe_shared_expert_intermediate_size or 0,
        }


def _experts(fields: ConfigFields) -> dict[str, Any]:
    """The settings of Qwen's routed experts."""
    fields.rename("num_local_experts", "num_experts")
    step = fields.take("decoder_sparse_step", 1)
    if not step:
        fields.refuse("decoder_sparse_step is 0, not a whole number of at least 1")
        step = 1
    dense = set(fields.take("mlp_only_layers", []))
    layers = fields.peek("num_hidden_layers", 1)
    pattern = tuple(int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers))
    return {
        "num_experts": fields.size("num_experts"),
        "moe_ffn_hidden_size": fields.size("moe_intermediate_size"),
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_topk": fields.size("num_experts_per_tok"),
        # Normalised afterwards, a softmax over all is one over those chosen.
        "moe_router_pre_softmax": not fields.take("norm_topk_prob", False),
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef", 0.0),
    }


def _expert_fields(settings: ModelSettings) -> dict[str, Any]:
    pattern = settings.moe_layer_freq
    return {
        "num_experts": settings.num_experts or 0,
        "moe_intermediate_size": settings.moe_ffn_hidden_size or 0,
        "num_experts_per_tok": settings.moe_router_topk,
        "norm_topk_prob": not settings.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [] if isinstance(pattern, int) else [at for at, has in enumerate(pattern) if not has],
        "router_aux_loss_coef": settings.moe_aux_loss_coeff,
    }
