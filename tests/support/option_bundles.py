# SPDX-License-Identifier: Apache-2.0
"""Options of Megatron in bundles: one run trains with all of a bundle, and rows of the table of options name its test.

Each option of a bundle changes what is computed, but those that the local implementation and the CPU need. A model has
few layers, so that values are such that they matter in it: angles that many turns would show, clamps that clamp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.corpus import make, write_json_lines
from tests.support.presets import LATENT, MOE, Options

__all__ = [
    "LAID_OUT",
    "MODELS",
    "SAVED",
    "SPREAD",
    "WITH_FILES",
    "changed_values",
    "listed_values",
    "options_with_files",
    "two_corpora",
]

_GATED: Options = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "attention_output_gate": True,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-3,
    "swiglu": True,
    "no_bias_swiglu_fusion": True,
    "position_embedding_type": "rope",
    "no_rope_fusion": True,
    "rotary_base": 1000000,
    "rotary_percent": 0.5,
    "rotary_seq_len_interpolation_factor": 2,
    "use_rope_scaling": True,
    "no_rope_freq": 2,
    "window_size": "8,0",
    "window_attn_skip_freq": 2,
}
_SCALED: Options = {
    "use_mup": True,
    "mup_base_hidden_size": 16,
    "mup_embedding_mult": 2.0,
    "mup_output_mult": 0.7,
    "mup_base_head_dim": 4.0,
    "mup_attn_scale_power": 0.5,
    "squared_relu": True,
    "softmax_type": "off-by-one",
    "position_embedding_type": "learned_absolute",
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "eod_mask_loss": True,
}
_CLAMPED: Options = {
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.02,
    "softmax_type": "learnable",
    "position_embedding_type": "yarn",
    "no_rope_fusion": True,
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 64,
    "yarn_beta_fast": 4.0,
    "yarn_beta_slow": 0.5,
    "no_yarn_correction_range_round_to_int": True,
    "mscale": 0.9,
    "mscale_all_dim": 0.8,
}
_LATENT: Options = {
    **LATENT,
    "rope_type": "yarn",
    "yarn_correction_range_round_to_int": True,
    "rotary_scaling_factor": 4.0,
    "mscale": 0.9,
    "mscale_all_dim": 0.8,
}
_GROUPS: Options = {
    **MOE,
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_layer_freq": "[0,1]",
    "moe_expert_capacity_factor": 1.0,
    "moe_token_drop_policy": "position",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "no_rope_fusion": True,
    "rotary_interleaved": True,
    "qk_l2_norm": True,
}
_SINGLE_EXPERT: Options = {
    **MOE,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_apply_probs_on_input": True,
    "moe_router_load_balancing_type": "global_aux_loss",
    "disable_bias_linear": True,
}
_SINKHORN: Options = {
    **MOE,
    "moe_router_topk": 1,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "sinkhorn",
    "disable_bias_linear": True,
}

_OWN_LAYERS: Options = {"spec": ["tests.support.own_layers", "layers"], "qk_l2_norm": True}

MODELS: Mapping[str, Options] = MappingProxyType(
    {
        "gates, windows, scaled positions": _GATED,
        "widths that transfer, masks by document": _SCALED,
        "clamped units, YaRN, learned softmax": _CLAMPED,
        "latent attention": _LATENT,
        "experts in groups with a capacity": _GROUPS,
        "one expert, balanced globally": _SINGLE_EXPERT,
        "sinkhorn": _SINKHORN,
        "layers of one's own": _OWN_LAYERS,
    }
)
"""What a model computes, for one rank."""

LAID_OUT: Mapping[str, tuple[str, Options]] = MappingProxyType(
    {
        "interleaved stages": (
            "pp2-vpp2",
            {"microbatch_group_size_per_virtual_pipeline_stage": 2, "mtp_standalone": True},
        ),
        "uneven stages": ("pp2", {"num_layers": 3, "decoder_first_pipeline_num_layers": 1}),
        "saved activations over ranks": (
            "tp2",
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
                "distribute_saved_activations": True,
            },
        ),
        "messages of experts behind others' products": (
            "moe-ep2",
            {"overlap_moe_expert_parallel_comm": True, "bf16": True, "disable_bias_linear": True},
        ),
    }
)
"""How a model is cut, by the name of a layout and what else is asked for."""

SPREAD: Mapping[str, tuple[str, int, Options]] = MappingProxyType(
    {
        "buckets of gradients": (
            "dp2",
            2,
            {
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "ddp_num_buckets": 3,
                "no_align_grad_reduce": True,
                "no_align_param_gather": True,
                "ddp_average_in_collective": True,
                "disable_gloo_process_groups": True,
                "create_all_gather_group": True,
                "data_parallel_random_init": True,
                "check_weight_hash_across_dp_replicas_interval": 1,
            },
        ),
        "sums in bf16 and fp32": (
            "dp2",
            2,
            {
                "overlap_grad_reduce": True,
                "ddp_bucket_size": 20000,
                "grad_reduce_in_bf16": True,
                "ddp_reduce_scatter_with_fp32_accumulation": True,
                "train_iters": None,
                "train_samples": 32,
                "lr_decay_samples": 32,
            },
        ),
        "stages before replicas": (
            "pp2",
            4,
            {
                "use_tp_pp_dp_mapping": True,
                "use_distributed_optimizer": None,
                "optimizer": "sgd",
                "grad_reduce_in_bf16": True,
                "ddp_param_name_patterns_for_fp32_local_accumulation": ["all"],
                "calculate_per_token_loss": True,
                "exit_signal_handler": True,
                "exit_duration_in_mins": 60,
                "log_straggler": True,
            },
        ),
    }
)
"""How the replicas of one job share gradients: layout, ranks, options."""

SAVED: Mapping[str, tuple[Options, Options]] = MappingProxyType(
    {
        "checkpoints kept and read": (
            {
                "ckpt_format": "torch_dist",
                "save_interval": 1,
                "save_retain_interval": 4,
                "no_save_rng": True,
                "no_ckpt_fully_parallel_save": True,
                "dist_ckpt_workers": 2,
                "verify_integrity": True,
                "log_progress": True,
                "save_params_interval": 3,
                "save_wgrads_interval": 3,
            },
            {
                "no_load_rng": True,
                "dist_ckpt_strictness": "raise_unexpected",
                "ckpt_fully_parallel_load": True,
                "no_ckpt_load_validate_sharding_integrity": True,
                "auto_detect_ckpt_format": True,
                "use_checkpoint_args": True,
                "exit_on_missing_checkpoint": True,
                "verify_integrity": True,
            },
        ),
        "checkpoints written and taken in other ways": (
            {
                "save_interval": 5,
                "dist_ckpt_optim_fully_reshardable": True,
                "distrib_optim_fully_reshardable_mem_efficient": True,
                "ckpt_fully_parallel_save_process_group": "ep_dp",
                "dist_ckpt_save_pre_mcore_014": True,
            },
            {
                "dist_ckpt_optim_fully_reshardable": True,
                "ckpt_fully_parallel_load": True,
                "ckpt_fully_parallel_load_process_group": "ep_dp",
                "ckpt_fully_parallel_load_exchange_algo": "gather_object",
                "use_checkpoint_args": True,
                "use_mp_args_from_checkpoint_args": True,
            },
        ),
        "checkpoints that replace each other": (
            {
                "save_interval": 100,
                "non_persistent_ckpt_type": "global",
                "non_persistent_save_interval": 1,
                "ckpt_assume_constant_structure": True,
            },
            {"non_persistent_ckpt_type": "global", "ckpt_assume_constant_structure": True},
        ),
    }
)
"""What is said where a job saves, and where it loads."""

WITH_FILES = (
    "a blend in random order",
    "a file that names the blend",
    "corpora per split",
    "a file that names corpora per split",
    "records of routers and losses",
)
"""What is read, and what is written besides: names for `options_with_files`."""


def listed_values(text: str) -> dict[str, str]:
    """Return the arguments that Megatron lists in what a run's first rank wrote to standard output."""
    values = dict(re.findall(r"^  (\w+) \.+ (.*)$", text, re.MULTILINE))
    assert len(values) > 300
    return values


def changed_values(ours: str, stock: str) -> dict[str, tuple[str, str]]:
    """Return Megatron's arguments that a run with a feature trains with otherwise than a stock job: (ours, stock's).

    Many options change no result, so that results alone would not tell that a feature ignores them.

    Args:
        ours: what the first rank of the one wrote to standard output.
        stock: what that of the other wrote.
    """
    values, others = listed_values(ours), listed_values(stock)
    return {name: (values[name], other) for name, other in others.items() if name in values and values[name] != other}


def two_corpora(folder: Path) -> list[str]:
    """Write two byte-level corpora of 40 documents and return their prefixes."""
    prefixes = []
    for name, word in (("one", "a"), ("other", "the other ")):
        texts = [f"{word}{number} " * (1 + number % 7) for number in range(40)]
        make(write_json_lines(folder / f"{name}.jsonl", texts), folder / name)
        prefixes.append(str(folder / name))
    return prefixes


def options_with_files(name: str, folder: Path) -> Options:
    """Return the options of a bundle that names files, and write those that are read.

    Args:
        name: one of `WITH_FILES`.
        folder: where corpora, files that name them, Megatron's index and the records are.
    """
    if name == "records of routers and losses":
        routed: Options = {**MOE, "disable_bias_linear": True, "moe_routing_trace_path": str(folder / "routed")}
        return {**routed, "check_for_spiky_loss": True}
    one, other = two_corpora(folder)
    blend = ["0.3", one, "0.7", other]
    (folder / "blend").write_text(" ".join(blend))
    (folder / "splits.json").write_text(json.dumps({"train": blend, "valid": [one], "test": [other]}))
    ways: dict[str, Options] = {
        "a blend in random order": {"data_path": blend, "split": "80,10,10", "dataloader_type": "cyclic"},
        "a file that names the blend": {"data_args_path": str(folder / "blend"), "split": "80,10,10"},
        "corpora per split": {"train_data_path": [one, other], "valid_data_path": [one], "test_data_path": [other]},
        "a file that names corpora per split": {"per_split_data_args_path": str(folder / "splits.json")},
    }
    return {
        "mock_data": None,
        "data_cache_path": str(folder / "cache"),
        "seed": 7,
        "seq_length": 24,
        "vocab_size": 263,
        "make_vocab_size_divisible_by": 64,
        "eval_iters": 1,
        **ways[name],
    }
