# SPDX-License-Identifier: Apache-2.0
"""Rows on data parallelism and process groups."""

from __future__ import annotations

from typing import Any

from megatron_ext.extras import pip_install
from megatron_ext.options.common_verdicts import (
    APART,
    AS_ANY_JOB,
    BACKENDS,
    HOT_BUNDLE,
    HOT_SAME,
    HOT_STATIC,
    NO_PEER_FSDP,
    PEERS,
    PEERS_BUNDLE,
    ROUNDS,
    SAME,
    STRATEGIES,
    WORKERS,
)
from megatron_ext.options.row import Asked, differs, everywhere, is_set, row, says
from megatron_ext.options.verdict import accepted, clash, refused, tested

__all__ = ["DATA_PARALLEL"]

_PLAIN_GATHER = accepted("the row on --use-distributed-optimizer has the say")
_LAYOUTS = tested(f"{BACKENDS}test_cpu_layouts.py::test_a_dense_layout_computes_what_one_rank_computes")
_BF16_SUMS = tested(f"{BACKENDS}test_cpu_table.py::test_gradients_reduced_in_bf16_and_summed_in_fp32")
_IN_BF16 = tested(f"{STRATEGIES}test_training.py::test_bf16_stays_as_near_to_stock_as_rounding_allows")
_INSTANCES = tested(f"{WORKERS}test_instances.py::test_workers_with_optimizer_instances_compute_what_one_has")
_HASHES_OF_PARTS = refused("Megatron hashes whole tensors, and fails on those that FSDP2 has cut", "drop one of them")
_LOADED_WRONGLY = refused(
    "Megatron 0.19 loads the optimizer's values wrongly from that format where several buckets are padded",
    "drop one of them",
)
_NEEDS_FSDP = refused("it needs --use-megatron-fsdp, which is refused")
_NO_EINOPS = refused("Megatron makes the groups of instances with it", pip_install("einops"))


def _has_instances(args: Any) -> bool:
    return bool(args.num_distributed_optimizer_instances > 1)


def _with_instances(asked: Asked) -> Asked:
    return lambda args: _has_instances(args) and asked(args)


def _has_no_einops(args: Any) -> bool:
    from megatron.core import parallel_state

    cuts_workers = getattr(args, "use_local_sgd", False) and getattr(args, "local_sgd_workers", None) != 1
    return not parallel_state.HAVE_EINOPS and not cuts_workers


DATA_PARALLEL = (
    row(
        "--use-distributed-optimizer",
        cpu=_LAYOUTS,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--overlap-grad-reduce",
        cpu=_LAYOUTS,
        local_sgd=APART,
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--overlap-param-gather",
        cpu=_LAYOUTS,
        local_sgd=APART,
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ddp-bucket-size",
        cpu=_LAYOUTS,
        local_sgd=APART,
        hot_switch=_IN_BF16,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ddp-num-buckets",
        cpu=SAME,
        local_sgd=APART,
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ddp-pad-buckets-for-high-nccl-busbw",
        cpu=SAME,
        local_sgd=APART,
        hot_switch=HOT_SAME,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--ddp-pad-buckets-for-high-nccl-busbw with --dist-ckpt-optim-fully-reshardable",
        lambda args: bool(
            args.ddp_pad_buckets_for_high_nccl_busbw
            and args.dist_ckpt_optim_fully_reshardable
            and args.overlap_grad_reduce
        ),
        **everywhere(_LOADED_WRONGLY),
    ),
    row(
        "--no-align-grad-reduce",
        says("align_grad_reduce", False),
        cpu=SAME,
        local_sgd=APART,
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--no-align-param-gather",
        says("align_param_gather", False),
        cpu=SAME,
        local_sgd=APART,
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        cpu=ROUNDS,
        local_sgd=ROUNDS,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ddp-average-in-collective",
        cpu=SAME,
        local_sgd=APART,
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--grad-reduce-in-bf16",
        cpu=_BF16_SUMS,
        local_sgd=APART,
        hot_switch=_IN_BF16,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        cpu=_BF16_SUMS,
        local_sgd=APART,
        hot_switch=_IN_BF16,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--calculate-per-token-loss",
        cpu=SAME,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--data-parallel-random-init",
        cpu=tested(f"{BACKENDS}test_cpu_table.py::test_random_weights_per_replica_are_made_equal"),
        local_sgd=ROUNDS,
        hot_switch=_IN_BF16,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--check-weight-hash-across-dp-replicas-interval",
        cpu=SAME,
        local_sgd=ROUNDS,
        hot_switch=_IN_BF16,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--check-weight-hash-across-dp-replicas-interval with --use-torch-fsdp2",
        lambda args: bool(args.check_weight_hash_across_dp_replicas_interval and args.use_torch_fsdp2),
        **everywhere(_HASHES_OF_PARTS),
    ),
    row(
        "--num-distributed-optimizer-instances above 1",
        _has_instances,
        cpu=_INSTANCES,
        local_sgd=_INSTANCES,
        hot_switch=tested(
            f"{STRATEGIES}test_instances.py::test_two_instances_compute_what_one_has_and_resume_with_the_same_bits"
        ),
        sync_service=tested(f"{PEERS}test_instances.py::test_a_peer_with_optimizer_instances_computes_what_one_has"),
    ),
    *(
        row(
            f"--num-distributed-optimizer-instances above 1 {rest}",
            _with_instances(asked),
            **everywhere(verdict),
        )
        for rest, asked, verdict in (
            (
                "without --use-distributed-optimizer",
                lambda args: not args.use_distributed_optimizer,
                refused("Megatron cuts the distributed optimizer alone into instances", "add the latter"),
            ),
            (
                "with --optimizer other than adam and sgd",
                differs("optimizer", "adam", "sgd"),
                refused("Megatron's layer-wise optimizer has one instance"),
            ),
            (
                "with --ddp-reduce-scatter-with-fp32-accumulation",
                is_set("ddp_reduce_scatter_with_fp32_accumulation"),
                refused("Megatron accumulates so inside one instance alone"),
            ),
        )
    ),
    row(
        "--num-distributed-optimizer-instances above 1 without einops",
        _with_instances(_has_no_einops),
        cpu=_NO_EINOPS,
        local_sgd=accepted("the groups of workers are made without it"),
        hot_switch=_NO_EINOPS,
        sync_service=_NO_EINOPS,
    ),
    row(
        "--init-model-with-meta-device",
        cpu=refused("without --use-megatron-fsdp, which needs a GPU, Megatron leaves the weights without values"),
        local_sgd=_NEEDS_FSDP,
        hot_switch=_NEEDS_FSDP,
        sync_service=_NEEDS_FSDP,
    ),
    row(
        "--use-torch-fsdp2",
        cpu=tested(f"{BACKENDS}test_cpu_fsdp2.py::test_parameters_sharded_by_fsdp2_train_as_whole_ones_do"),
        local_sgd=tested(f"{WORKERS}test_fsdp2.py::test_workers_that_shard_their_weights_do_what_whole_ones_do").but(
            "--local-sgd-sync-in-forward",
            clash(
                "--local-sgd-sync-in-forward is not combined with --use-torch-fsdp2, which gathers the parameters of a "
                "layer before the hooks that wait for them",
                "drop one of them",
            ),
        ),
        hot_switch=refused("guests take whole parameters from home", "use --use-distributed-optimizer"),
        sync_service=tested(
            f"{PEERS}test_layouts.py::test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding"
        ),
        spes=refused(
            "experts that other peers train are taken whole, and it cuts them", "use --use-distributed-optimizer"
        ),
    ),
    row(
        "--use-megatron-fsdp",
        cpu=refused("its buffers and streams are CUDA's", "use --use-distributed-optimizer"),
        local_sgd=refused("the outer step cannot write into its sharded parameters", "use --use-distributed-optimizer"),
        hot_switch=refused("guests take whole parameters from home", "use --use-distributed-optimizer"),
        sync_service=NO_PEER_FSDP,
    ),
    row(
        "--use-distributed-optimizer without --overlap-param-gather",
        lambda args: bool(
            (args.use_distributed_optimizer or args.optimizer == "dist_muon") and not args.overlap_param_gather
        ),
        cpu=_PLAIN_GATHER,
        local_sgd=_PLAIN_GATHER.but(
            "--local-sgd-sync-in-forward",
            clash(
                "--local-sgd-sync-in-forward with --use-distributed-optimizer needs --overlap-param-gather: "
                "without it all parameters are gathered before the forward pass",
                "add it (with --overlap-grad-reduce) or drop the option",
            ),
        ),
        hot_switch=_PLAIN_GATHER,
        sync_service=_PLAIN_GATHER,
    ),
)
