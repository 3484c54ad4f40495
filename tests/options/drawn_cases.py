# SPDX-License-Identifier: Apache-2.0
"""Command lines as the dice have them: options that people combine, at the size of a toy."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tests.support.presets import LATENT, MOE, Options, Value

__all__ = ["drawn_case"]

Choices = Sequence[tuple[float, Options]]
"""Bundles of options with the weight of each; what is left of 1 is that of none."""

MODELS: Mapping[str, Choices] = {
    "attention": [
        (0.3, {"group_query_attention": True, "num_query_groups": 2}),
        (0.1, {"add_qkv_bias": True, "disable_bias_linear": True}),
        (0.1, {"qk_layernorm": True}),
        (0.15, {**LATENT, "max_position_embeddings": 64}),
    ],
    "positions": [
        (0.5, {"position_embedding_type": "rope", "no_rope_fusion": True}),
        (0.1, {"position_embedding_type": "rope", "no_rope_fusion": True, "rotary_percent": 0.5}),
        (0.1, {"position_embedding_type": "rope", "no_rope_fusion": True, "rotary_base": 500000}),
        (0.1, {"position_embedding_type": "none"}),
    ],
    "activation": [
        (0.5, {"swiglu": True, "no_bias_swiglu_fusion": True}),
        (0.15, {"squared_relu": True}),
    ],
    "norm": [(0.5, {"normalization": "RMSNorm"})],
    "biases": [(0.5, {"disable_bias_linear": True})],
    "output": [(0.5, {"untie_embeddings_and_output_weights": True})],
    "start": [(0.2, {"init_method_std": 0.01})],
    "layers": [(0.3, {"num_layers": 4})],
    "dropout": [(0.3, {"hidden_dropout": 0.1, "attention_dropout": 0.1})],
    "prediction": [(0.15, {"mtp_num_layers": 1})],
}

EXPERTS: Mapping[str, Choices] = {
    "balance": [
        (0.3, {"moe_router_load_balancing_type": "seq_aux_loss"}),
        (0.1, {"moe_router_load_balancing_type": "none"}),
        (
            0.2,
            {
                "moe_router_load_balancing_type": "none",
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 1e-3,
            },
        ),
    ],
    "router": [
        (0.2, {"moe_z_loss_coeff": 1e-3}),
        (0.2, {"moe_router_pre_softmax": True}),
        (0.2, {"moe_router_dtype": "fp32"}),
        (0.1, {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    ],
    "experts": [
        (0.3, {"moe_shared_expert_intermediate_size": 32}),
        (0.2, {"moe_layer_freq": "[0,1]", "num_layers": 2}),
        (0.2, {"moe_ffn_hidden_size": 48}),
    ],
    "dispatch": [(0.4, {"moe_token_dispatcher_type": "allgather"})],
}

TRAINING: Mapping[str, Choices] = {
    "precision": [(0.5, {"bf16": True}), (0.1, {"bf16": True, "grad_reduce_in_bf16": True})],
    "optimizer": [
        (0.4, {"use_distributed_optimizer": True}),
        (0.2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
        (0.1, {"optimizer": "sgd", "lr": 0.05}),
    ],
    "schedule": [
        (0.3, {"lr_decay_style": "cosine", "lr_decay_iters": 20, "lr_warmup_iters": 2, "min_lr": 1e-5}),
        (0.2, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2, "lr_decay_iters": 20, "min_lr": 1e-5}),
        (0.1, {"lr_warmup_fraction": 0.1, "lr_decay_style": "linear", "min_lr": 1e-5}),
    ],
    "weights": [
        (0.3, {"weight_decay": 0.1, "adam_beta2": 0.95}),
        (0.1, {"decoupled_lr": 5e-4, "decoupled_min_lr": 1e-5}),
    ],
    "clip": [(0.2, {"clip_grad": 0.0}), (0.2, {"clip_grad": 0.1})],
    "loss": [(0.3, {"calculate_per_token_loss": True})],
    "memory": [
        (0.2, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        (0.2, {"recompute_granularity": "selective"}),
    ],
    "batch": [(0.3, {"micro_batch_size": 1}), (0.2, {"global_batch_size": 16})],
    "data": [
        (0.2, {"split": "90,5,5"}),
        (0.2, {"dataloader_type": "cyclic"}),
        (0.1, {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}),
        (0.1, {"num_workers": 1}),
    ],
    "evaluation": [(0.3, {"eval_interval": 2, "eval_iters": 1})],
    "log": [
        (0.3, {"log_params_norm": True, "log_num_zeros_in_grad": True}),
        (0.2, {"log_throughput": True, "timing_log_level": 2}),
    ],
    "checks": [
        (0.2, {"no_check_for_nan_in_loss_and_grad": True}),
        (0.2, {"rerun_mode": "disabled"}),
        (0.2, {"check_weight_hash_across_dp_replicas_interval": 2}),
    ],
    "run": [(0.2, {"manual_gc": True, "manual_gc_interval": 2}), (0.2, {"exit_duration_in_mins": 1000})],
    "files": [
        (0.25, {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}),
        (0.1, {"ckpt_fully_parallel_load": True}),
        (0.1, {"no_ckpt_fully_parallel_save": True}),
    ],
    "strictness": [(0.3, {"dist_ckpt_strictness": "log_all"})],
    "structure": [(0.2, {"ckpt_assume_constant_structure": True})],
    "placement": [(0.1, {"use_tp_pp_dp_mapping": True}), (0.1, {"data_parallel_random_init": True})],
}

LAYOUTS: Choices = [
    (0.2, {"tensor_model_parallel_size": 2}),
    (0.2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    (0.2, {"pipeline_model_parallel_size": 2}),
    (
        0.1,
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
    ),
]


def drawn_case(seed: int, *, experts: bool | None = None) -> dict[str, Value]:
    """Return the options of a run, laid over those of the toy GPT.

    Args:
        seed: of the dice.
        experts: whether the model has experts; as the dice have it where that is None.
    """
    dice = random.Random(seed)
    with_experts = dice.random() < 0.35
    if experts is not None:
        with_experts = experts
    case: dict[str, Value] = {}
    groups = [*MODELS.values(), *TRAINING.values(), LAYOUTS]
    if with_experts:
        case |= MOE
        groups += EXPERTS.values()
    for choices in groups:
        case |= _thrown(dice, choices)
    return case | _agreeing(case)


def _thrown(dice: random.Random, choices: Choices) -> Options:
    left = dice.random()
    for weight, options in choices:
        left -= weight
        if left < 0:
            return options
    return {}


def _agreeing(case: Mapping[str, Value]) -> dict[str, Value]:
    """Return what must be otherwise for Megatron to take the other options."""
    changed: dict[str, Value] = {}
    tensor = int(str(case.get("tensor_model_parallel_size", 1)))
    if "num_experts" in case:
        # Megatron trains experts on tensor-parallel ranks with sequence parallelism only, and without biases.
        changed["disable_bias_linear"] = True
        if tensor > 1:
            changed["sequence_parallel"] = True
    if "multi_latent_attention" in case:
        changed |= {"group_query_attention": None, "num_query_groups": None, **LATENT}
    if "mtp_num_layers" in case:
        # Over several stages it is not laid out with tied embeddings, nor with learned positions.
        changed["untie_embeddings_and_output_weights"] = True
        changed |= {"position_embedding_type": "rope", "no_rope_fusion": True}
        changed["recompute_granularity"] = changed["recompute_method"] = changed["recompute_num_layers"] = None
    if case.get("optimizer") == "sgd":
        changed["use_distributed_optimizer"] = None
        changed["overlap_param_gather"] = None
    return changed
