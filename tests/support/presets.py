# SPDX-License-Identifier: Apache-2.0
"""Toy models, parallel layouts and precisions as Megatron command lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

Value = bool | int | float | str | Sequence[int | float | str] | None
"""True is a bare flag; None or False drops it; a sequence gives several values."""
Options = Mapping[str, Value]
"""Megatron options by name, with underscores and without leading dashes."""

TOY_GPT: Options = MappingProxyType(
    {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 128,
        "make_vocab_size_divisible_by": 1,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 4,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "clip_grad": 1.0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "seed": 1234,
        "log_interval": 1,
        "eval_iters": 0,
        "eval_interval": 1000,
        "num_workers": 0,
        "distributed_backend": "nccl" if torch.cuda.device_count() else "gloo",
        "transformer_impl": "local",
        "attention_backend": "unfused",
        "no_gradient_accumulation_fusion": True,
        "no_masked_softmax_fusion": True,
        "no_bias_gelu_fusion": True,
        "no_bias_dropout_fusion": True,
        "no_persist_layer_norm": True,
    }
)

MOE: Options = MappingProxyType(
    {
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_token_dispatcher_type": "alltoall",
    }
)

GROUPED: Options = MappingProxyType({**MOE, "moe_grouped_gemm": True, "disable_bias_linear": True})
"""Experts whose products are one call of Transformer Engine's."""

LATENT: Options = MappingProxyType(
    {
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rope_type": "rope",
        "no_rope_fusion": True,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "disable_bias_linear": True,
    }
)
"""Multi-latent attention."""

HYBRID: Options = MappingProxyType(
    {
        "num_layers": None,
        "hybrid_layer_pattern": "M*-M",
        "transformer_impl": "transformer_engine",
        "attention_backend": "auto",
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "mamba_state_dim": 16,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "mamba_num_heads": 6,
    }
)
"""State-space layers beside attention and an MLP, on Transformer Engine's layers: Megatron has no others for them."""

DELTA_NET_SIZES: Options = MappingProxyType(
    {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
    }
)
"""Sizes of Gated DeltaNet, in a GPT or in a hybrid model."""

DELTA_NET: Options = MappingProxyType(
    {
        "num_layers": 3,
        "transformer_impl": "transformer_engine",
        "attention_backend": "auto",
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 3,
        **DELTA_NET_SIZES,
        "position_embedding_type": "rope",
        "no_rope_fusion": True,
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
    }
)
"""Two layers of Gated DeltaNet before one of softmax attention, on Transformer Engine's layers: there are no others."""

SPARSE_SIZES: Options = MappingProxyType(
    {
        **LATENT,
        "dsa_indexer_n_heads": 2,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": 16,
        "dsa_indexer_loss_coeff": 0.01,
    }
)
"""Sizes of DeepSeek's sparse attention over latent attention, likewise."""

SPARSE: Options = MappingProxyType(
    {
        **SPARSE_SIZES,
        "transformer_impl": "transformer_engine",
        "attention_backend": "auto",
        "experimental_attention_variant": "dsa",
        "untie_embeddings_and_output_weights": True,
    }
)
"""DeepSeek's sparse attention over latent attention, likewise."""

LATENT_EXPERTS: Options = MappingProxyType(
    {**GROUPED, "transformer_impl": "transformer_engine", "attention_backend": "auto", "moe_latent_size": 16}
)
"""Experts that read and write fewer channels than the model has, likewise."""

PRECISIONS: Mapping[str, Options] = MappingProxyType(
    {
        "fp32": {},
        "bf16": {"bf16": True},
        "fp32-distopt": {"use_distributed_optimizer": True},
        "fp32-fsdp2": {"use_torch_fsdp2": True, "untie_embeddings_and_output_weights": True},
        "bf16-distopt": {"bf16": True, "use_distributed_optimizer": True},
        "bf16-distopt-overlap": {
            "bf16": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "ddp_bucket_size": 20000,  # several buckets even in a toy model
        },
    }
)
"""Number formats and optimizers; combine with a layout's options."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one model replica is cut over ranks."""

    name: str
    model_parallel_size: int = 1
    """Ranks of one replica: TP times PP."""
    least_data_parallel_size: int = 1
    """Replicas of the dense part that one worker needs at least: the EP size."""
    options: Options = field(default_factory=dict)

    def world_size(self, workers: int = 1) -> int:
        """Ranks of `workers` workers of the smallest size."""
        return workers * self.least_data_parallel_size * self.model_parallel_size


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            Layout(name="single"),
            Layout(name="dp2", least_data_parallel_size=2),
            Layout(name="tp2", model_parallel_size=2, options={"tensor_model_parallel_size": 2}),
            Layout(
                name="tp2-sp",
                model_parallel_size=2,
                options={"tensor_model_parallel_size": 2, "sequence_parallel": True},
            ),
            Layout(name="pp2", model_parallel_size=2, options={"pipeline_model_parallel_size": 2}),
            Layout(
                name="pp2-vpp2",
                model_parallel_size=2,
                options={
                    "num_layers": 4,
                    "pipeline_model_parallel_size": 2,
                    "num_virtual_stages_per_pipeline_rank": 2,
                },
            ),
            Layout(
                name="pp3-prediction",  # multi-token prediction in a stage of its own
                model_parallel_size=3,
                options={"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Ett|m|L"},
            ),
            Layout(
                name="tp2-pp2",
                model_parallel_size=4,
                options={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            ),
            Layout(name="latent", options=LATENT),
            Layout(
                name="latent-tp2",
                model_parallel_size=2,
                options={**LATENT, "tensor_model_parallel_size": 2},
            ),
            Layout(
                name="moe-ep2",
                least_data_parallel_size=2,
                options={**MOE, "expert_model_parallel_size": 2},
            ),
            Layout(
                name="moe-ep2-allgather",
                least_data_parallel_size=2,
                options={**MOE, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
            ),
        )
    }
)


def toy_gpt(*bundles: Options, **overrides: Value) -> list[str]:
    """Return the command line of a tiny GPT on mock data, on GPUs if there are any, without fused kernels.

    Args:
        bundles: options laid over `TOY_GPT` in order: `LAYOUTS["tp2"].options`, `PRECISIONS["bf16"]`, ...
        overrides: options laid over those, such as `train_iters=8`, `bf16=True` or `clip_grad=None`.
    """
    options: dict[str, Value] = dict(TOY_GPT)
    for bundle in bundles:
        options.update(bundle)
    options.update(overrides)
    return command_line(options)


def command_line(options: Options) -> list[str]:
    """Write options as flags."""
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        if isinstance(value, Sequence) and not isinstance(value, str):
            words.extend(map(str, value))
        else:
            words.append(str(value))
    return words
