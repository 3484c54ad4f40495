# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3: multi-latent attention, and experts that a sigmoid scores and a bias balances."""

from __future__ import annotations

from typing import Any

from megatron_ext.convert.families.config_fields import ConfigFields
from megatron_ext.convert.families.family import common_config, common_settings
from megatron_ext.convert.hf_names import Names
from megatron_ext.convert.settings import ModelSettings

__all__ = ["DeepseekV3"]

_EPSILON = 1e-6
"""Of the norms inside attention."""

_BEST_OF_GROUP = 2
"""By the sum of how many scores a group of experts is chosen."""


class DeepseekV3:
    """DeepSeek V3 and R1, and smaller models of that layout."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    names = Names(shared="mlp.shared_experts")

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        fields.must_be("attention_bias", False)
        fields.must_be("rope_interleave", True)
        fields.must_be("scoring_func", "sigmoid")
        fields.must_be("topk_method", "noaux_tc")
        fields.must_be("moe_layer_freq", 1)
        fields.must_be("norm_topk_prob", True)
        # The norms inside attention have it whatever the file says, and Megatron's norms all have one epsilon.
        fields.must_stay("rms_norm_eps", _EPSILON)
        if fields.peek("q_lora_rank", None) is None:
            fields.refuse("q_lora_rank is null, and Megatron normalises no queries that are not projected down")
        fields.take("qk_head_dim")  # the sum of two others
        common = common_settings(fields)
        width = fields.size("moe_intermediate_size")
        shared = fields.need("n_shared_experts", 0)
        rotated = fields.size("qk_rope_head_dim")
        fields.take("head_dim")
        dense = fields.need("first_k_dense_replace", 0)
        layers = common["num_layers"]
        common |= {"num_query_groups": common["num_attention_heads"], "kv_channels": _head_size(common)}
        return ModelSettings(
            qk_layernorm=True,
            kv_lora_rank=fields.size("kv_lora_rank"),
            q_lora_rank=fields.need("q_lora_rank", None),
            qk_head_dim=fields.size("qk_nope_head_dim"),
            qk_pos_emb_head_dim=rotated,
            v_head_dim=fields.size("v_head_dim"),
            num_experts=fields.size("n_routed_experts"),
            moe_ffn_hidden_size=width,
            moe_layer_freq=1 if not dense else tuple(int(layer >= dense) for layer in range(layers)),
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_topk_scaling_factor=float(fields.need("routed_scaling_factor", 1.0)),
            moe_shared_expert_intermediate_size=shared * width or None,
            moe_aux_loss_coeff=fields.take("aux_loss_alpha", 0.0),
            **self._choice(fields),
            **common,
        )

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        width = settings.moe_ffn_hidden_size or 1
        pattern = settings.moe_layer_freq
        config = common_config(settings)
        del config["head_dim"]
        return {
            **config,
            "attention_bias": False,
            "q_lora_rank": settings.q_lora_rank,
            "kv_lora_rank": settings.kv_lora_rank or 0,
            "qk_nope_head_dim": settings.qk_head_dim or 0,
            "qk_rope_head_dim": settings.qk_pos_emb_head_dim or 0,
            "v_head_dim": settings.v_head_dim or 0,
            "n_routed_experts": settings.num_experts or 0,
            "n_shared_experts": (settings.moe_shared_expert_intermediate_size or 0) // width,
            "moe_intermediate_size": settings.moe_ffn_hidden_size or 0,
            "first_k_dense_replace": 0 if isinstance(pattern, int) else pattern.index(1),
            "num_experts_per_tok": settings.moe_router_topk,
            "n_group": settings.moe_router_num_groups or 1,
            "topk_group": settings.moe_router_group_topk or 1,
            "routed_scaling_factor": settings.moe_router_topk_scaling_factor,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }

    def _choice(self, fields: ConfigFields) -> dict[str, Any]:
        """How experts are chosen."""
        topk = fields.size("num_experts_per_tok")
        groups = fields.need("n_group", 1)
        chosen = fields.need("topk_group", 1)
        if groups == 1:
            return {"moe_router_topk": topk}
        # Megatron chooses groups by the sum of their best topk / topk_group scores.
        if topk // chosen != _BEST_OF_GROUP:
            fields.refuse(
                f"num_experts_per_tok is {topk} and topk_group {chosen}: Megatron chooses groups by their best "
                f"{topk // chosen} scores, this family by their best {_BEST_OF_GROUP}"
            )
        return {"moe_router_topk": topk, "moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _head_size(common: dict[str, Any]) -> int:
    """What Megatron keeps as the size of a head, which latent attention does not look at."""
    return int(common["hidden_size"] // common["num_attention_heads"])
