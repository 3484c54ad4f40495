# SPDX-License-Identifier: Apache-2.0
"""Megatron's options on CPU: other defaults, and the ones that cannot work."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ext.options import refusals
from megatron_ext.seams.arguments import asks_for_cuda_graphs

__all__ = ["ARGUMENT_DEFAULTS", "RULES", "Rule", "problems", "set_argument_defaults"]

ARGUMENT_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "num_workers": 0,
}
"""What a Megatron option is on CPU when the command line does not say, by its name in the namespace."""

_NEEDS_TE = "it needs Transformer Engine, which needs a GPU"
_UNFUSED = "Megatron's own attention is the only one on CPU"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One option, or value of an option, that cannot work on CPU."""

    option: str
    """The flag, with the value that is meant."""

    asked: Callable[[Any], bool]
    """Whether the parsed, not yet validated, arguments ask for it."""

    why: str
    """What is missing."""

    way_out: str = "drop it"
    """What to write instead."""


def set_argument_defaults(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the defaults that let a plain Megatron command run on CPU; explicit values still win."""
    parser.set_defaults(**ARGUMENT_DEFAULTS)


def problems(args: argparse.Namespace) -> list[str]:
    """Return one sentence for each option in `args` that cannot work on CPU, with the way out.

    Args:
        args: Megatron's arguments as parsed, before Megatron validates and changes them.
    """
    found = [f"{rule.option} cannot work on CPU: {rule.why}; {rule.way_out}" for rule in RULES if rule.asked(args)]
    if _fused_kernels_installed():
        found.append(
            "Transformer Engine or Apex is installed: Megatron would call their CUDA kernels on CPU tensors; "
            "use an environment without them"
        )
    return found + refusals(args, "cpu")


def _fused_kernels_installed() -> bool:
    return bool(importlib.import_module("megatron.core.optimizer.distrib_optimizer").HAVE_APEX_OR_TE)


def _recomputes(module: str) -> Callable[[Any], bool]:
    return lambda args: module in (args.recompute_modules or ())


def _attention(*names: str) -> Callable[[Any], bool]:
    # A namespace may hold the enum or, from a test or a YAML file, its name.
    return lambda args: getattr(args.attention_backend, "name", args.attention_backend) in names


RULES: tuple[Rule, ...] = (
    # Parallelism and communication.
    Rule(
        option="--context-parallel-size above 1",
        asked=lambda args: (
            args.context_parallel_size > 1
            and not getattr(args, "hot_switch_strategies", None)
            and not getattr(args, "hot_switch_strategy_file", None)
        ),
        why="Megatron's attention over a split sequence is in Transformer Engine alone",
        way_out="use 1, or hot switching, which brings its own",
    ),
    Rule(
        option="--distributed-backend nccl",
        asked=lambda args: args.distributed_backend == "nccl",
        why="NCCL moves GPU memory",
        way_out="use gloo, the default here",
    ),
    Rule(
        option="--pipeline-model-parallel-comm-backend",
        asked=lambda args: args.pipeline_model_parallel_comm_backend is not None,
        why="NCCL and UCC move GPU memory",
    ),
    Rule(
        option="--use-ring-exchange-p2p",
        asked=lambda args: args.use_ring_exchange_p2p,
        why="it needs a torch that was built with ring exchange",
    ),
    Rule(option="--tp-comm-overlap", asked=lambda args: args.tp_comm_overlap, why=_NEEDS_TE),
    # The transformer's implementation.
    Rule(
        option="--transformer-impl transformer_engine",
        asked=lambda args: args.transformer_impl == "transformer_engine",
        why=_NEEDS_TE,
        way_out="use local, the default here",
    ),
    Rule(
        option="--transformer-impl inference_optimized",
        asked=lambda args: args.transformer_impl == "inference_optimized",
        why="its layers call CUDA kernels",
        way_out="use local, the default here",
    ),
    Rule(option="--attention-backend flash", asked=_attention("flash"), why=_UNFUSED, way_out="use auto"),
    Rule(option="--attention-backend fused", asked=_attention("fused"), why=_UNFUSED, way_out="use auto"),
    Rule(
        option="--use-flash-attn",
        asked=lambda args: args.use_flash_attn,
        why="FlashAttention is a CUDA kernel",
    ),
    Rule(
        option="--experimental-attention-variant",
        asked=lambda args: args.experimental_attention_variant is not None,
        why=_NEEDS_TE,
    ),
    Rule(
        option="--apply-layernorm-1p",
        asked=lambda args: args.layernorm_zero_centered_gamma,
        why="torch's LayerNorm has no zero-centred weight",
    ),
    Rule(
        option="--fp32-residual-connection with --bf16 or --fp16",
        asked=lambda args: args.fp32_residual_connection and (args.bf16 or args.fp16),
        why="torch's norms take one number format for input and weight",
        way_out="drop it or train in fp32",
    ),
    Rule(
        option="--use-te-activation-func",
        asked=lambda args: args.use_te_activation_func,
        why=_NEEDS_TE,
    ),
    Rule(
        option="--use-transformer-engine-op-fuser",
        asked=lambda args: args.use_transformer_engine_op_fuser,
        why=_NEEDS_TE,
    ),
    Rule(
        option="--fused-residual-rmsnorm",
        asked=lambda args: args.fused_residual_rmsnorm,
        why=_NEEDS_TE,
    ),
    Rule(
        option="--use-kitchen-attention",
        asked=lambda args: args.use_kitchen_attention,
        why="its kernels are CUDA kernels",
    ),
    Rule(
        option="--batch-invariant-mode",
        asked=lambda args: args.batch_invariant_mode,
        why="its kernels are CUDA kernels",
    ),
    Rule(option="--delay-wgrad-compute", asked=lambda args: args.delay_wgrad_compute, why=_NEEDS_TE),
    Rule(
        option="--defer-embedding-wgrad-compute",
        asked=lambda args: args.defer_embedding_wgrad_compute,
        why="it needs the fused gradient accumulation, a CUDA kernel",
    ),
    # Number formats.
    Rule(
        option="--fp8-format",
        asked=lambda args: args.fp8 is not None,
        why=_NEEDS_TE,
        way_out="use --bf16",
    ),
    Rule(
        option="--fp4-format",
        asked=lambda args: args.fp4 is not None,
        why=_NEEDS_TE,
        way_out="use --bf16",
    ),
    # Mixture of experts.
    Rule(
        option="--moe-grouped-gemm",
        asked=lambda args: args.moe_grouped_gemm,
        why="grouped matrix products are CUDA kernels",
        way_out="without it the experts run one after the other",
    ),
    Rule(
        option="--moe-latent-size",
        asked=lambda args: args.moe_latent_size is not None,
        why=_NEEDS_TE,
    ),
    Rule(option="--moe-permute-fusion", asked=lambda args: args.moe_permute_fusion, why=_NEEDS_TE),
    Rule(option="--moe-router-fusion", asked=lambda args: args.moe_router_fusion, why=_NEEDS_TE),
    Rule(
        option="--moe-token-dispatcher-type flex",
        asked=lambda args: args.moe_token_dispatcher_type == "flex",
        why="DeepEP and HybridEP are CUDA libraries",
        way_out="use alltoall or allgather",
    ),
    Rule(
        option="--moe-enable-deepep",
        asked=lambda args: args.moe_enable_deepep,
        why="DeepEP is a CUDA library",
        way_out="use --moe-token-dispatcher-type alltoall",
    ),
    # Memory and graphs.
    Rule(
        option="--cuda-graph-impl, --enable-cuda-graph or --external-cuda-graph",
        asked=asks_for_cuda_graphs,
        why="there are no CUDA graphs",
    ),
    Rule(
        option="--cpu-offloading-num-layers",
        asked=lambda args: args.cpu_offloading_num_layers > 0,
        why="activations are in the CPU's memory already",
    ),
    Rule(
        option="--fine-grained-activation-offloading",
        asked=lambda args: args.fine_grained_activation_offloading,
        why="activations are in the CPU's memory already",
    ),
    Rule(
        option="--recompute-modules layernorm",
        asked=_recomputes("layernorm"),
        why=_NEEDS_TE,
        way_out="use core_attn",
    ),
    Rule(
        option="--recompute-modules mlp without --disable-bias-linear",
        asked=lambda args: _recomputes("mlp")(args) and args.add_bias_linear,
        why="the recompute function of Megatron 0.19 hangs on a layer that returns its bias",
        way_out="add --disable-bias-linear or use core_attn",
    ),
    Rule(
        option="--recompute-modules moe without --disable-bias-linear",
        asked=lambda args: _recomputes("moe")(args) and args.add_bias_linear,
        why="the recompute function of Megatron 0.19 fails on experts with a bias",
        way_out="add --disable-bias-linear or use core_attn",
    ),
    # Watching a run.
    Rule(
        option="--profile without --use-pytorch-profiler",
        asked=lambda args: args.profile and not args.use_pytorch_profiler,
        why="Nsight records CUDA",
        way_out="add --use-pytorch-profiler",
    ),
    Rule(
        option="--record-memory-history",
        asked=lambda args: args.record_memory_history,
        why="the history is that of CUDA's allocator",
    ),
    Rule(option="--log-energy", asked=lambda args: args.log_energy, why="the meters are those of NVIDIA's GPUs"),
    Rule(
        option="--log-max-attention-logit",
        asked=lambda args: args.log_max_attention_logit,
        why=_NEEDS_TE,
    ),
    Rule(
        option="--gpu-sniff-test-interval",
        asked=lambda args: args.gpu_sniff_test_interval is not None,
        why="the test times GPUs",
    ),
)
"""Every rule; which options of data parallelism, optimizers and checkpoints ."""
