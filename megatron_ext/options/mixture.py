# SPDX-License-Identifier: Apache-2.0
"""Rows on mixtures of experts."""

from __future__ import annotations

from typing import Any

from megatron_ext.options.common_verdicts import (
    AS_A_PEER,
    BACKENDS,
    BUNDLE,
    CURRENT_LAYERS,
    EXPERTS,
    HOT_BUNDLE,
    NO_TE_ON_CPU,
    ON_A_GPU,
    PAIRWISE,
    PEER_ON_A_GPU,
    PEERS,
    PEERS_BUNDLE,
    PEERS_CURRENT_LAYERS,
    STRATEGIES,
    UNKNOWN_TENSORS,
    WORKERS,
    WORKERS_ON_TE,
)
from megatron_ext.options.row import Asked, Row, everywhere, given, is_set, row, says
from megatron_ext.options.verdict import OptionVerdict, accepted, clash, needs_gpu, refused, tested

__all__ = ["MIXTURE"]

_UNTRAINED_BIASES = refused(
    "Megatron 0.19 fails on biases of experts whose tensor parallel size is above 1, and on its local implementation "
    "without expert parallelism",
    "give --disable-bias-linear",
)
_NO_SHARED_BIASES = refused("Megatron 0.19 makes shared experts without them only", "give --disable-bias-linear")
_WITH_CAPACITIES = accepted("it is read with --moe-expert-capacity-factor alone, which is refused")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _balances(args: Any, *types: str) -> bool:
    return not set(types).isdisjoint(_listed(args.moe_router_load_balancing_type))


def _has_untrained_biases(args: Any) -> bool:
    if not args.num_experts or not args.add_bias_linear:
        return False
    tensor_parallel = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    # There autograd refuses to add a bias to what is a view of its input.
    adds_in_place = args.transformer_impl == "local" and args.expert_model_parallel_size == 1
    return bool(tensor_parallel > 1 or adds_in_place)


_MEAN_OF_WORKERS = tested(f"{WORKERS}test_router_biases.py::test_a_round_takes_the_mean_of_the_workers_biases")
_MEAN_OF_PEERS = tested(f"{PEERS}test_router_biases.py::test_a_round_takes_the_mean_of_the_peers_biases")


def _biases_of_all(option: str) -> OptionVerdict:
    return clash(
        f"{PAIRWISE} is not combined with {option}, of whose biases rounds take the mean over all workers",
        "drop one of them",
    )


def _grouped_with(option: str, asked: Asked, reason: str, way_out: str) -> Row:
    """Return the row of an option that grouped experts do not go with where some of them are frozen."""
    of_each = accepted("what is said of each of them holds")
    refusal = clash(
        f"--moe-grouped-gemm with frozen experts does not go with {option}: {reason}, which needs a GPU to be tried",
        way_out,
    )
    return row(
        f"--moe-grouped-gemm with {option}",
        lambda args: bool(args.moe_grouped_gemm and asked(args)),
        **everywhere(of_each),
        spes=AS_A_PEER.but("frozen experts", refusal),
    )


MIXTURE = (
    row(
        "--num-experts with biases",
        _has_untrained_biases,
        cpu=_UNTRAINED_BIASES,
        local_sgd=_UNTRAINED_BIASES,
        hot_switch=accepted("each strategy has sizes of its own, and is checked by itself"),
        sync_service=_UNTRAINED_BIASES,
    ),
    row(
        "--moe-shared-expert-intermediate-size with biases",
        lambda args: bool(args.num_experts and args.moe_shared_expert_intermediate_size and args.add_bias_linear),
        **everywhere(_NO_SHARED_BIASES),
    ),
    row(
        "--moe-router-enable-expert-bias",
        cpu=_MEAN_OF_WORKERS,
        local_sgd=_MEAN_OF_WORKERS.but(PAIRWISE, _biases_of_all("--moe-router-enable-expert-bias")),
        hot_switch=tested(f"{STRATEGIES}test_training.py::test_biases_of_routers_follow_the_tokens_of_all_strategies"),
        sync_service=_MEAN_OF_PEERS,
    ),
    row(
        "--moe-router-load-balancing-type quantile_balancing",
        lambda args: "quantile_balancing" in args.moe_router_load_balancing_type,
        cpu=tested(f"{BACKENDS}test_cpu_table.py::test_routers_that_balance_by_quantiles"),
        local_sgd=_MEAN_OF_WORKERS.but(
            PAIRWISE, _biases_of_all("--moe-router-load-balancing-type quantile_balancing")
        ),
        hot_switch=refused(
            "its quantiles are of the tokens of one micro-batch, which the strategies decide", "use another type"
        ),
        sync_service=_MEAN_OF_PEERS,
        in_config=("transformer.moe_router_load_balancing_type",),
    ),
    row(
        "--moe-expert-rank-capacity-factor",
        cpu=needs_gpu("it needs HybridEP or NCCL EP, which are CUDA libraries"),
        local_sgd=refused("all ranks are asked in every step whether one has overflowed"),
        hot_switch=refused("which tokens are dropped would depend on the strategies"),
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--moe-grouped-gemm",
        cpu=needs_gpu("grouped matrix products are CUDA kernels", "drop it, and the experts run one after the other"),
        local_sgd=WORKERS_ON_TE,
        hot_switch=tested(f"{STRATEGIES}test_transformer_engine.py::test_hot_equals_static"),
        sync_service=PEER_ON_A_GPU,
        spes=AS_A_PEER.but(
            "frozen experts",
            tested(f"{EXPERTS}test_grouped_experts.py::test_grouped_experts_learn_what_sequential_ones_learn"),
        ),
    ),
    _grouped_with(
        "--fp8-format, --fp4-format or --te-precision-config-file",
        lambda args: bool(args.fp8 or args.fp4 or args.te_precision_config_file),
        "the scales of two groups of experts would have to be kept apart",
        "use --bf16, or drop --moe-grouped-gemm (SequentialMLP trains them)",
    ),
    _grouped_with(
        "--use-transformer-engine-op-fuser",
        is_set("use_transformer_engine_op_fuser"),
        "its operations take all experts of a rank at once",
        "drop --use-transformer-engine-op-fuser",
    ),
    _grouped_with(
        "--fine-grained-activation-offloading",
        is_set("fine_grained_activation_offloading"),
        "it frees an input of which two groups of experts keep a part each",
        "drop --fine-grained-activation-offloading",
    ),
    row(
        "--moe-latent-size",
        given("moe_latent_size"),
        cpu=NO_TE_ON_CPU,
        hot_switch=tested(f"{STRATEGIES}test_transformer_engine.py::test_hot_equals_static"),
        local_sgd=CURRENT_LAYERS,
        sync_service=PEERS_CURRENT_LAYERS,
    ),
    *(
        row(
            f"--moe-single-grouped-{what}",
            cpu=NO_TE_ON_CPU,
            local_sgd=UNKNOWN_TENSORS,
            hot_switch=UNKNOWN_TENSORS,
            sync_service=UNKNOWN_TENSORS,
        )
        for what in ("weight", "bias")
    ),
    row("--moe-permute-fusion", cpu=NO_TE_ON_CPU, local_sgd=ON_A_GPU, hot_switch=ON_A_GPU, sync_service=PEER_ON_A_GPU),
    row(
        "--moe-router-fusion",
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
        spes=AS_A_PEER.but(
            "--spes-using-decayed-aux-loss",
            clash(
                "--spes-using-decayed-aux-loss weights token counts, and only a GPU can show whether Transformer "
                "Engine's kernel of --moe-router-fusion takes weighted ones",
                "drop one of them",
            ),
        ),
    ),
    row(
        "--moe-token-dispatcher-type flex",
        says("moe_token_dispatcher_type", "flex"),
        cpu=needs_gpu("DeepEP and HybridEP are CUDA libraries", "use alltoall or allgather"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--moe-enable-deepep",
        cpu=needs_gpu("DeepEP is a CUDA library", "use --moe-token-dispatcher-type alltoall"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--overlap-moe-expert-parallel-comm",
        cpu=BUNDLE,
        local_sgd=BUNDLE.but(
            "--local-sgd-sync-in-forward",
            clash(
                "--local-sgd-sync-in-forward is not combined with --overlap-moe-expert-parallel-comm, with which "
                "Megatron runs pieces of layers past the model's forward pass, at whose end the last parameters arrive",
                "drop one of them",
            ),
        ),
        hot_switch=refused(
            "Megatron then runs pieces of layers by a plan of its own, past the forward pass of the model, in which "
            "guests take their weights and are told where documents begin"
        ),
        sync_service=PEERS_BUNDLE,
        in_config=("transformer.overlap_moe_expert_parallel_comm",),
    ),
    row(
        "--moe-router-load-balancing-type seq_aux_loss",
        lambda args: bool(_balances(args, "seq_aux_loss") and any(_listed(args.moe_aux_loss_coeff))),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=tested(f"{STRATEGIES}test_routers.py::test_losses_by_sequence_are_those_of_documents"),
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--moe-router-load-balancing-type global_aux_loss",
        lambda args: bool(_balances(args, "global_aux_loss") and any(_listed(args.moe_aux_loss_coeff))),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=refused(
            "each micro-batch is balanced by the counts of those before it in the step, whose order and sizes the "
            "strategies decide",
            "use seq_aux_loss, which no strategy changes, or aux_loss",
        ),
        sync_service=PEERS_BUNDLE,
        in_config=("transformer.moe_router_load_balancing_type", "transformer.moe_aux_loss_coeff"),
    ),
    row(
        "--moe-router-load-balancing-type sinkhorn",
        lambda args: bool(args.num_experts) and _balances(args, "sinkhorn"),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=refused(
            "which expert a token gets depends on all tokens of its micro-batch, padding included, and so on the "
            "strategies",
            "use another type",
        ),
        sync_service=PEERS_BUNDLE,
        in_config=("transformer.moe_router_load_balancing_type",),
    ),
    row(
        "--moe-expert-capacity-factor",
        given("moe_expert_capacity_factor"),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=refused("which tokens are dropped would depend on the strategies"),
        sync_service=PEERS_BUNDLE,
        peers_share="moe_expert_capacity_factor",
        in_config=("transformer.moe_expert_capacity_factor",),
    ),
    row(
        "--moe-mlp-glu-interleave-size",
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
        peers_share="moe_mlp_glu_interleave_size",
    ),
    row(
        "--moe-shared-expert-glu-interleave-size",
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
        peers_share="moe_shared_expert_glu_interleave_size",
    ),
    row(
        "--moe-router-topk above --num-experts",
        lambda args: bool(args.num_experts and args.moe_router_topk > args.num_experts),
        **everywhere(refused("Megatron's first step fails", "give at most the number of experts")),
    ),
    *(
        row(
            f"--moe-{name}",
            cpu=BUNDLE,
            local_sgd=BUNDLE,
            hot_switch=HOT_BUNDLE,
            sync_service=PEERS_BUNDLE,
            peers_share=f"moe_{name.replace('-', '_')}",
        )
        for name in (
            "layer-freq",
            "router-topk",
            "router-num-groups",
            "router-group-topk",
            "router-pre-softmax",
            "router-score-function",
            "router-topk-scaling-factor",
            "apply-probs-on-input",
        )
    ),
    row(
        "--moe-token-drop-policy",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=_WITH_CAPACITIES,
        sync_service=PEERS_BUNDLE,
        peers_share="moe_token_drop_policy",
    ),
)
