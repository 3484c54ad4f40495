# SPDX-License-Identifier: Apache-2.0
"""Which of Megatron's arguments change what a model computes, and what a conversion makes of each.

`ModelSettings` has those that are carried. The others convert at one value alone, which is named here, so that
nothing is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["NOT_OF_THE_MODEL", "ONLY"]

ONLY: Mapping[str, Any] = MappingProxyType(
    {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "squared_relu": False,
        "openai_gelu": False,
        "quick_geglu": False,
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
        "layernorm_zero_centered_gamma": False,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": False,
        "qk_l2_norm": False,
        "attention_output_gate": False,
        "softmax_type": "vanilla",
        "window_size": None,
        "window_attn_skip_freq": None,
        "experimental_attention_variant": None,
        "linear_attention_freq": None,
        "heterogeneous_layers_config_path": None,
        "heterogeneous_layers_config_encoded_json": None,
        "hybrid_layer_pattern": None,
        "mtp_use_repeated_layer": False,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "no_rope_freq": None,
        "use_mup": False,
        "moe_latent_size": None,
        "moe_expert_capacity_factor": None,
        "moe_apply_probs_on_input": False,
        "moe_mlp_glu_interleave_size": None,
        "moe_shared_expert_glu_interleave_size": None,
        "moe_input_jitter_eps": None,
        "mla_down_proj_fusion": False,
        "yarn_original_max_position_embeddings": None,
        "yarn_beta_fast": None,
        "yarn_beta_slow": None,
        "yarn_correction_range_round_to_int": None,
    }
)
"""By its name in Megatron's namespace, the value at which an argument says nothing that would be lost."""

NOT_OF_THE_MODEL = frozenset(
    {
        # What is trained on, in which order, and which of its tokens count.
        "dataloader_type",
        "dataloader_inter_document_masking",
        "seed",
        "split",
        "seq_length",
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        # Said by the tensors themselves.
        "padded_vocab_size",
        # They count with other arguments alone, which `ONLY` has.
        "dsa_indexer_topk",
        "moe_token_drop_policy",
        "mup_width_mult",
        "mup_base_hidden_size",
        "mup_embedding_mult",
        "mup_output_mult",
        "mup_base_head_dim",
        "mup_attn_scale_power",
        "mamba_state_dim",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
    }
)
"""Arguments that peers have to agree on, and that say nothing about the function of the weights."""
