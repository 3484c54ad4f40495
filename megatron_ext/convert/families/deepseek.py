# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2 and V3: multi-latent attention, and experts that a softmax, or a sigmoid and a bias, chooses."""

from __future__ import annotations

from typing import Any

from megatron_ext.convert.families.config_fields import ConfigFields, is_whole
from megatron_ext.convert.families.family import common_config, common_settings
from megatron_ext.convert.hf_names import Names
from megatron_ext.convert.settings import ModelSettings

__all__ = ["DeepseekV2", "DeepseekV3"]

_EPSILON = 1e-6
"""Of the norms inside attention."""


class DeepseekV3:
    """DeepSeek V3 and R1, and smaller models of that layout."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    names = Names(shared="mlp.shared_experts")
    predicts = True

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        fields.must_be("rope_interleave", True)
        fields.must_be("scoring_func", "sigmoid")
        fields.must_be("topk_method", "noaux_tc")
        fields.must_be("norm_topk_prob", True)
        return ModelSettings(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            **_groups(fields, best=2),
            **_settings(fields),
        )

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        return {
            **_config(settings),
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }


class DeepseekV2:
    """DeepSeek V2 Lite, and what has its layout: experts that a softmax over all of them scores."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    names = Names(shared="mlp.shared_experts")
    predicts = False

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        fields.must_be("mlp_bias", False)
        fields.must_be("scoring_func", "softmax")
        # transformers never normalises; DeepSeek's own code does, and then leaves the scaling factor out.
        fields.must_be("norm_topk_prob", False)
        limited = fields.peek("topk_method", "greedy") == "group_limited_greedy"
        fields.must_be("topk_method", "greedy", "group_limited_greedy")
        groups = _groups(fields, best=1) if limited else {}
        for name in ("n_group", "topk_group"):
            fields.take(name)  # without a meaning for greedy
        return ModelSettings(moe_router_pre_softmax=True, **groups, **_settings(fields))

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        limited = settings.moe_router_num_groups is not None
        return {
            **_config(settings),
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy" if limited else "greedy",
        }


def _query_rank(fields: ConfigFields) -> int | None:
    """Take the rank of queries, which may be null."""
    rank: int | None = fields.need("q_lora_rank", None)
    if rank is not None and not is_whole(rank, 1):
        fields.refuse(f"q_lora_rank is {rank!r}, neither null nor a whole number of at least 1")
        return None
    return rank


def _settings(fields: ConfigFields) -> dict[str, Any]:
    """The settings that both have."""
    fields.must_be("attention_bias", False)
    fields.must_be("moe_layer_freq", 1)
    # The norms inside attention have it whatever the file says, and Megatron's norms all have one epsilon.
    fields.must_stay("rms_norm_eps", _EPSILON)
    fields.take("qk_head_dim")  # the sum of two others
    # Megatron's latent attention has yarn, and leaves --use-rope-scaling out of account.
    common = common_settings(fields, ("default", "yarn"))
    # As in DeepSeek's own files; transformers knows neither field.
    balance, by_sequence = fields.take("aux_loss_alpha", 0.0), fields.take("seq_aux", True)
    width = fields.size("moe_intermediate_size")
    shared = fields.need("n_shared_experts", 0)
    fields.take("head_dim")
    dense = fields.need("first_k_dense_replace", 0)
    layers = common["num_layers"]
    common |= {"num_query_groups": common["num_attention_heads"], "kv_channels": _head_size(common)}
    return {
        "qk_layernorm": True,
        "kv_lora_rank": fields.size("kv_lora_rank"),
        "q_lora_rank": _query_rank(fields),
        "qk_head_dim": fields.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": fields.size("qk_rope_head_dim"),
        "v_head_dim": fields.size("v_head_dim"),
        "num_experts": fields.size("n_routed_experts"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": 1 if not dense else tuple(int(layer >= dense) for layer in range(layers)),
        "moe_router_topk": fields.size("num_experts_per_tok"),
        "moe_router_topk_scaling_factor": float(fields.need("routed_scaling_factor", 1.0)),
        "moe_shared_expert_intermediate_size": shared * width or None,
        "moe_aux_loss_coeff": balance,
        "moe_router_load_balancing_type": "seq_aux_loss" if balance and by_sequence else "aux_loss",
        **common,
    }


def _config(settings: ModelSettings) -> dict[str, Any]:
    """The fields that both have."""
    width = settings.moe_ffn_hidden_size or 1
    pattern = settings.moe_layer_freq
    config = common_config(settings)
    del config["head_dim"]
    if settings.moe_aux_loss_coeff:
        config["aux_loss_alpha"] = settings.moe_aux_loss_coeff
        config["seq_aux"] = settings.moe_router_load_balancing_type == "seq_aux_loss"
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
    }


def _groups(fields: ConfigFields, best: int) -> dict[str, Any]:
    """How groups of experts are chosen: by the sum of their `best` scores."""
    topk = fields.peek("num_experts_per_tok", 1)
    groups = fields.need("n_group", 1)
    chosen = fields.need("topk_group", 1)
    if groups == 1:
        return {}
    if not all(isinstance(value, int) and value > 0 for value in (topk, groups, chosen)):
        fields.refuse(f"num_experts_per_tok, n_group and topk_group are {topk!r}, {groups!r} and {chosen!r}")
    # Megatron chooses groups by the sum of their best topk / topk_group scores.
    elif topk // chosen != best:
        fields.refuse(
            f"num_experts_per_tok is {topk} and topk_group {chosen}: Megatron chooses groups by their best "
            f"{topk // chosen} scores, this family by their best {best}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _head_size(common: dict[str, Any]) -> int:
    """What Megatron keeps as the size of a head, which latent attention does not look at."""
    return int(common["hidden_size"] // common["num_attention_heads"])
