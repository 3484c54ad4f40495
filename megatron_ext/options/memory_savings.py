# SPDX-License-Identifier: Apache-2.0
"""Rows on CUDA graphs, and on recomputing and offloading activations."""

from __future__ import annotations

from typing import Any

from megatron_ext.options.common_verdicts import (
    AS_A_PEER,
    BUNDLE,
    HOT_BUNDLE,
    ON_A_GPU,
    PEER_ON_A_GPU,
    PEERS_BUNDLE,
)
from megatron_ext.options.row import Asked, row, says
from megatron_ext.options.verdict import clash, needs_gpu, refused

__all__ = ["MEMORY_SAVINGS"]

_PER_STRATEGY = refused(
    "what is offloaded when is remembered for one strategy's micro-batches",
    named="--cpu-offloading-num-layers or --fine-grained-activation-offloading",
)
_HAS_THE_MEMORY = needs_gpu("activations are in the CPU's memory already")
_NO_BIAS = "add --disable-bias-linear or use core_attn"


def _captures(args: Any) -> bool:
    return bool(args.cuda_graph_impl != "none" or args.enable_cuda_graph or args.external_cuda_graph)


def _recomputes(module: str) -> Asked:
    return lambda args: module in (args.recompute_modules or ())


MEMORY_SAVINGS = (
    row(
        "--cuda-graph-impl, --enable-cuda-graph or --external-cuda-graph",
        _captures,
        cpu=needs_gpu("there are no CUDA graphs"),
        local_sgd=ON_A_GPU.but(
            "--local-sgd-sync-in-forward",
            clash(
                "--local-sgd-sync-in-forward is not combined with CUDA graphs, whose replay does not wait for a "
                "round's results",
                "drop --cuda-graph-impl, --enable-cuda-graph and --external-cuda-graph, or the option",
            ),
        ),
        hot_switch=refused(
            "guests' parameters lie elsewhere in every step, and a graph would use them where they were"
        ),
        sync_service=PEER_ON_A_GPU,
        spes=AS_A_PEER.but(
            "--spes-using-decayed-aux-loss",
            clash(
                "--spes-using-decayed-aux-loss weights token counts by factors that change from step to step, "
                "which a captured CUDA graph would not see",
                "drop the graphs (--cuda-graph-impl), or the option",
            ),
        ),
        flags=("--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph"),
    ),
    row(
        "--cpu-offloading-num-layers",
        lambda args: bool(args.cpu_offloading_num_layers > 0),
        cpu=_HAS_THE_MEMORY,
        local_sgd=ON_A_GPU,
        hot_switch=_PER_STRATEGY,
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.cpu_offloading_num_layers",),
    ),
    row(
        "--fine-grained-activation-offloading",
        cpu=_HAS_THE_MEMORY,
        local_sgd=ON_A_GPU,
        hot_switch=_PER_STRATEGY,
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.fine_grained_activation_offloading",),
    ),
    row(
        "--recompute-modules layernorm",
        _recomputes("layernorm"),
        cpu=needs_gpu("it needs Transformer Engine, which needs a GPU", "use core_attn"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--recompute-modules mlp without --disable-bias-linear",
        lambda args: _recomputes("mlp")(args) and args.add_bias_linear,
        cpu=needs_gpu("the recompute function of Megatron 0.19 hangs on a layer that returns its bias", _NO_BIAS),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--recompute-modules moe without --disable-bias-linear",
        lambda args: _recomputes("moe")(args) and args.add_bias_linear,
        cpu=needs_gpu("the recompute function of Megatron 0.19 fails on experts with a bias", _NO_BIAS),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--cuda-graph-impl full_iteration",
        says("cuda_graph_impl", "full_iteration"),
        cpu=needs_gpu("there are no CUDA graphs"),
        local_sgd=refused("a captured iteration cannot have an outer step in some iterations alone"),
        hot_switch=refused("a captured iteration cannot switch strategies"),
        sync_service=refused("a captured iteration would not see what a round writes"),
    ),
    row(
        "--distribute-saved-activations",
        cpu=HOT_BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        in_config=("transformer.distribute_saved_activations",),
    ),
)
