# SPDX-License-Identifier: Apache-2.0
"""Rows on who computes a layer: Transformer Engine, Megatron's own code, kernels, and number formats."""

from __future__ import annotations

from megatron_ext.options.asked import asks_to_switch, has_linear_layers, heterogeneous_layers
from megatron_ext.options.common_verdicts import (
    APART,
    AS_A_PEER,
    BACKENDS,
    BARE,
    BUNDLE,
    HOT_BUNDLE,
    HOT_STATIC,
    NO_TE_ON_CPU,
    ON_A_GPU,
    ON_GPU_ALONE_HOT,
    PEER_ON_A_GPU,
    PEERS,
    PEERS_BUNDLE,
    STRATEGIES,
    WORKERS,
    WORKERS_ON_TE,
)
from megatron_ext.options.row import Asked, differs, everywhere, given, row, says
from megatron_ext.options.verdict import needs_gpu, refused, tested

__all__ = ["IMPLEMENTATIONS"]

_SCALES = refused(
    "the scales and copies of weights that Transformer Engine keeps would be home's only",
    "use --bf16",
    named="--fp8-format, --fp4-format or --te-precision-config-file",
)
_LAYERS_ALL_ALIKE = refused(
    "Megatron 0.19 checks it, and makes layers that are all alike", "give the file: --heterogeneous-layers-config-path"
)
_EXPERTS_ALL_ALIKE = refused(
    "Megatron 0.19 then makes experts in all layers, and the MLPs of the file in none", "drop one of them"
)
_NO_VIRTUAL_STAGES = refused(
    "Megatron 0.19 does not say which virtual stage it builds, and fails", "use one chunk per pipeline rank"
)
_WRONG_AXIS = refused(
    "Megatron 0.19 gathers the outputs of a linear layer along another axis then, and the first step fails",
    "drop --sequence-parallel, or the layers with replace_with_linear",
)
_UNFUSED = needs_gpu("Megatron's own attention is the only one on CPU", "use auto")
_LOCAL = "use local, the default here"
_BF16 = needs_gpu("it needs Transformer Engine, which needs a GPU", "use --bf16")
_CUDA_KERNELS = needs_gpu("its kernels are CUDA kernels")


def _attention(name: str) -> Asked:
    # A namespace may hold the enum or, from a test or a YAML file, its name.
    return lambda args: getattr(args.attention_backend, "name", args.attention_backend) == name


IMPLEMENTATIONS = (
    row(
        "--transformer-impl transformer_engine",
        says("transformer_impl", "transformer_engine"),
        cpu=needs_gpu("it needs Transformer Engine, which needs a GPU", _LOCAL),
        local_sgd=WORKERS_ON_TE,
        hot_switch=tested(f"{STRATEGIES}test_transformer_engine.py::test_hot_equals_static").but(
            "--hot-switch-attention rows",
            refused(
                "its attention takes no mask between the documents of a row",
                "drop it or use --transformer-impl local",
                named="--hot-switch-attention rows with --transformer-impl transformer_engine",
            ),
        ),
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--transformer-impl inference_optimized",
        differs("transformer_impl", "local", "transformer_engine"),
        cpu=needs_gpu("its layers call CUDA kernels", _LOCAL),
        local_sgd=ON_A_GPU,
        hot_switch=refused("its layers do not train", "use transformer_engine or local"),
        sync_service=PEER_ON_A_GPU,
        spes=AS_A_PEER.but(
            "frozen experts",
            refused(
                "it has grouped experts of its own, whose two groups, trained and frozen, need a GPU to be tried",
                "use transformer_engine or local",
            ),
        ),
    ),
    row(
        "--attention-backend flash",
        _attention("flash"),
        cpu=_UNFUSED,
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--attention-backend fused",
        _attention("fused"),
        cpu=_UNFUSED,
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--use-flash-attn",
        cpu=needs_gpu("FlashAttention is a CUDA kernel"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--use-te-activation-func",
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.use_te_activation_func",),
    ),
    row(
        "--use-transformer-engine-op-fuser",
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.use_transformer_engine_op_fuser",),
    ),
    row(
        "--fused-residual-rmsnorm",
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.fused_residual_rmsnorm",),
    ),
    row(
        "--use-kitchen-attention",
        cpu=_CUDA_KERNELS,
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--batch-invariant-mode",
        cpu=_CUDA_KERNELS,
        local_sgd=ON_A_GPU,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.batch_invariant_mode",),
    ),
    row(
        "--delay-wgrad-compute",
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.delay_wgrad_compute",),
    ),
    row(
        "--defer-embedding-wgrad-compute",
        cpu=needs_gpu("it needs the fused gradient accumulation, a CUDA kernel"),
        local_sgd=ON_A_GPU,
        hot_switch=tested(
            f"{STRATEGIES}test_transformer_engine.py::test_products_that_add_their_gradients_themselves_change_nothing"
        ),
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.defer_embedding_wgrad_compute",),
    ),
    row(
        "--fp8-format",
        given("fp8"),
        cpu=_BF16,
        local_sgd=ON_A_GPU,
        hot_switch=_SCALES,
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.fp8",),
    ),
    row(
        "--fp4-format",
        given("fp4"),
        cpu=_BF16,
        local_sgd=ON_A_GPU,
        hot_switch=_SCALES,
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.fp4",),
    ),
    row(
        "--fp32-residual-connection with --bf16 or --fp16",
        lambda args: bool(args.fp32_residual_connection and (args.bf16 or args.fp16)),
        cpu=needs_gpu("torch's norms take one number format for input and weight", "drop it or train in fp32"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--transformer-impl local",
        says("transformer_impl", "local"),
        cpu=BARE,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        cpu_default={"transformer_impl": "local"},
    ),
    row(
        "--no-gradient-accumulation-fusion",
        says("gradient_accumulation_fusion", False),
        cpu=BARE,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        cpu_default={"gradient_accumulation_fusion": False},
    ),
    row(
        "--no-masked-softmax-fusion",
        says("masked_softmax_fusion", False),
        cpu=BARE,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        cpu_default={"masked_softmax_fusion": False},
    ),
    row(
        "--no-bias-gelu-fusion",
        says("bias_gelu_fusion", False),
        cpu=BARE,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        cpu_default={"bias_gelu_fusion": False},
    ),
    row(
        "--no-bias-swiglu-fusion",
        says("bias_swiglu_fusion", False),
        cpu=BARE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        cpu_default={"bias_swiglu_fusion": False},
    ),
    row(
        "--no-bias-dropout-fusion",
        says("bias_dropout_fusion", False),
        cpu=BARE,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        cpu_default={"bias_dropout_fusion": False},
    ),
    row(
        "--no-rope-fusion",
        says("apply_rope_fusion", False),
        cpu=BARE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
        cpu_default={"apply_rope_fusion": False},
    ),
    row(
        "--no-persist-layer-norm",
        says("no_persist_layer_norm", True),
        cpu=BARE,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        cpu_default={"no_persist_layer_norm": True},
    ),
    row(
        "--te-precision-config-file",
        given("te_precision_config_file"),
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=_SCALES,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--te-rng-tracker",
        cpu=needs_gpu("it keeps the states of CUDA's random numbers"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--heterogeneous-layers-config-path",
        cpu=tested(f"{BACKENDS}test_cpu_table.py::test_layers_of_different_kinds"),
        local_sgd=tested(
            f"{WORKERS}test_heterogeneous_layers.py::test_workers_are_equal_after_a_round_and_a_run_resumes_bit_for_bit"
        ),
        hot_switch=tested(f"{STRATEGIES}test_heterogeneous_layers.py::test_hot_equals_static"),
        sync_service=tested(
            f"{PEERS}test_heterogeneous_peers.py"
            "::test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding"
        ),
    ),
    row(
        "--heterogeneous-layers-config-path with --num-experts",
        lambda args: bool(args.heterogeneous_layers_config_path and args.num_experts),
        flags=("--heterogeneous-layers-config-path",),
        **everywhere(_EXPERTS_ALL_ALIKE),
    ),
    row(
        "--heterogeneous-layers-config-path with linear layers and --sequence-parallel",
        lambda args: (
            args.sequence_parallel
            and args.tensor_model_parallel_size > 1
            and not asks_to_switch(args)  # which checks each strategy
            and has_linear_layers(args)
        ),
        flags=("--heterogeneous-layers-config-path",),
        **everywhere(_WRONG_AXIS),
    ),
    row(
        "--heterogeneous-layers-config-path with virtual stages",
        lambda args: bool(
            args.heterogeneous_layers_config_path
            and (args.num_virtual_stages_per_pipeline_rank or args.num_layers_per_virtual_pipeline_stage)
        ),
        flags=("--heterogeneous-layers-config-path",),
        **everywhere(_NO_VIRTUAL_STAGES),
    ),
    row(
        "--heterogeneous-layers-config-path of another number of layers",
        lambda args: bool((layers := heterogeneous_layers(args)) and args.num_layers not in (None, len(layers))),
        flags=("--heterogeneous-layers-config-path",),
        **everywhere(
            refused(
                "Megatron 0.19 takes the first layers of the file, or fails where it builds the model",
                "give --num-layers as many as block_configs has",
            )
        ),
    ),
    row(
        "--heterogeneous-layers-config-encoded-json without --heterogeneous-layers-config-path",
        lambda args: bool(
            args.heterogeneous_layers_config_encoded_json and args.heterogeneous_layers_config_path is None
        ),
        flags=("--heterogeneous-layers-config-encoded-json",),
        **everywhere(_LAYERS_ALL_ALIKE),
    ),
)
