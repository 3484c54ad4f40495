# SPDX-License-Identifier: Apache-2.0
"""What the Megatron jobs of a run have to agree on beside their tensors."""

from __future__ import annotations

from typing import Any

from megatron_ext.sync_service.megatron.arguments import interval_of
from megatron_ext.sync_service.protocol.report import INTERVAL

__all__ = ["MODEL_OPTIONS", "agreed"]

MODEL_OPTIONS = {
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "attention_output_gate": "--attention-output-gate",
    "softmax_type": "--softmax-type",
    "window_size": "--window-size",
    "window_attn_skip_freq": "--window-attn-skip-freq",
    "qk_layernorm": "--qk-layernorm",
    "qk_l2_norm": "--qk-l2-norm",
    "experimental_attention_variant": "--experimental-attention-variant",
    "dsa_indexer_topk": "--dsa-indexer-topk",
    "position_embedding_type": "--position-embedding-type",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "rotary_interleaved": "--rotary-interleaved",
    "rotary_seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
    "use_rope_scaling": "--use-rope-scaling",
    "rope_scaling_factor": "--rope-scaling-factor",
    "no_rope_freq": "--no-rope-freq",
    "rope_type": "--rope-type",
    "rotary_scaling_factor": "--rotary-scaling-factor",
    "yarn_original_max_position_embeddings": "--yarn-original-max-position-embeddings",
    "yarn_beta_fast": "--yarn-beta-fast",
    "yarn_beta_slow": "--yarn-beta-slow",
    "yarn_correction_range_round_to_int": "--yarn-correction-range-round-to-int",
    "mscale": "--mscale",
    "mscale_all_dim": "--mscale-all-dim",
    "normalization": "--normalization",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "apply_residual_connection_post_layernorm": "--apply-residual-connection-post-layernorm",
    "swiglu": "--swiglu",
    "squared_relu": "--squared-relu",
    "openai_gelu": "--openai-gelu",
    "quick_geglu": "--quick-geglu",
    "glu_linear_offset": "--glu-linear-offset",
    "moe_mlp_glu_interleave_size": "--moe-mlp-glu-interleave-size",
    "moe_shared_expert_glu_interleave_size": "--moe-shared-expert-glu-interleave-size",
    "activation_func_clamp_value": "--activation-func-clamp-value",
    "moe_layer_freq": "--moe-layer-freq",
    "moe_router_topk": "--moe-router-topk",
    "moe_router_num_groups": "--moe-router-num-groups",
    "moe_router_group_topk": "--moe-router-group-topk",
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_router_score_function": "--moe-router-score-function",
    "moe_router_topk_scaling_factor": "--moe-router-topk-scaling-factor",
    "moe_apply_probs_on_input": "--moe-apply-probs-on-input",
    "moe_expert_capacity_factor": "--moe-expert-capacity-factor",
    "moe_token_drop_policy": "--moe-token-drop-policy",
    "use_mup": "--use-mup",
    "mup_width_mult": "--mup-width-mult",
    "mup_base_hidden_size": "--mup-base-hidden-size",
    "mup_embedding_mult": "--mup-embedding-mult",
    "mup_output_mult": "--mup-output-mult",
    "mup_base_head_dim": "--mup-base-head-dim",
    "mup_attn_scale_power": "--mup-attn-scale-power",
    "mtp_num_layers": "--mtp-num-layers",
    "reset_position_ids": "--reset-position-ids",
    "reset_attention_mask": "--reset-attention-mask",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "eod_mask_loss": "--eod-mask-loss",
}
"""Megatron's arguments that say what a model of some tensors computes, and their options. The mean of two models that
compute something else is neither of them, although their tensors have equal shapes."""


def agreed(args: Any) -> dict[str, str]:
    """Return what the peers have to agree on beside the tensors: interval, order of the samples, and the function.

    Args:
        args: Megatron's arguments, checked.
    """
    samples = args.train_samples or args.train_iters * args.global_batch_size
    # Parts of the one and of the other would have tokens in common.
    reads_documents = args.hot_switch_strategies is not None or args.hot_switch_strategy_file is not None
    return {
        INTERVAL: interval_of(args),
        "--seed": str(args.seed),
        "--seq-length": str(args.seq_length),
        "--split": str(args.split),
        "--dataloader-type": str(args.dataloader_type),
        "--train-samples, or --train-iters times --global-batch-size": str(samples),
        "vocabulary with its padding (--make-vocab-size-divisible-by)": str(args.padded_vocab_size),
        "data (--hot-switch-strategies reads documents, also with one strategy)": (
            "documents" if reads_documents else "samples of --seq-length tokens"
        ),
        **{option: str(getattr(args, name)) for name, option in MODEL_OPTIONS.items()},
    }
