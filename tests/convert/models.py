# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family that converts, made by transformers."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROWS = 250
"""Of every model's vocabulary."""

IDS = torch.arange(1, 41).view(2, 20) * 5
"""Two rows of tokens."""

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": ROWS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, scaled, tied": ("Llama", {"head_dim": 24, "tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmoe": (
        "Olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "num_key_value_heads": 2},
    ),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe, dense layer": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 16, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek_v3, plain": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "rope_parameters": _PLAIN,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2, groups": (
        "DeepseekV2",
        {
            **_LATENT,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 16.0,
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,  # with as many as groups, the best experts are in the best groups anyway
            "rope_parameters": _PLAIN,
        },
    ),
}
"""By name, the class in transformers and what of its configuration is not as in all."""


def _quiet() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model; its norms, biases and balancing biases are random too."""
    _quiet()
    import transformers

    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **options})
    generator = torch.Generator().manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in key:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if "norm" in key else 0.06 * noise)
    return model


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Save a model as transformers does."""
    make(name, dtype).save_pretrained(folder, **options)
    return folder


@functools.cache
def logits(name: str) -> torch.Tensor:
    """Return what a model says of `IDS`, in fp32."""
    with torch.no_grad():
        return make(name)(IDS).logits


def loaded(folder: Path) -> Any:
    """Return a model as transformers loads it."""
    _quiet()
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


Parametrize = Callable[..., Any]
