# SPDX-License-Identifier: Apache-2.0
"""Rows on the groups of ranks, and on tensor, pipeline and context parallelism."""

from __future__ import annotations

from typing import Any

from megatron_ext.options.asked import asks_to_switch
from megatron_ext.options.common_verdicts import (
    APART,
    BACKENDS,
    BARE,
    BUNDLE,
    HOT_BUNDLE,
    HOT_SAME,
    HOT_STATIC,
    NEEDS_TE,
    NO_TE_ON_CPU,
    ON_A_GPU,
    ON_GPU_ALONE,
    ON_GPU_ALONE_HOT,
    OTHER_WAYS,
    PEER_ON_A_GPU,
    PEERS_BUNDLE,
    ROUNDS,
    SAME,
    STRATEGIES,
)
from megatron_ext.options.row import everywhere, given, is_set, row, says
from megatron_ext.options.verdict import needs_gpu, refused, tested

__all__ = ["RANK_GROUPS"]

_GTP = refused("Megatron does not combine it with groups inside the data-parallel dimension")
_ALL_GATHER = refused("its groups are for --use-megatron-fsdp, which needs a GPU", "drop it")
_NO_GROUPS = refused("Megatron's process groups would never be built")
_NOTHING_TRAINED = refused("nothing would be trained")
_UNEQUAL_CHUNKS = refused(
    "Megatron cuts the layers of a pipeline rank into equal virtual stages, and fails where it builds the model",
    "give a number of virtual stages that divides the layers of every pipeline rank, or drop it",
)
_STAGES = tested(f"{STRATEGIES}test_stages.py::test_stages_of_the_command_line_are_homes")


def _splits_sequences(args: Any) -> bool:
    return args.context_parallel_size > 1 and not asks_to_switch(args)


def _cuts_layers_unequally(args: Any) -> bool:
    """Return whether a pipeline rank's layers cannot be cut into the virtual stages that are asked for."""
    ranks, stages = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank or 1
    if ranks == 1 or stages == 1 or args.num_layers is None or args.pipeline_model_parallel_layout:
        return False
    ends = [args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers]
    of_ends = [layers for layers in ends if layers is not None]
    embedding_and_loss = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    # The ranks between ends that were given share what these leave.
    left, left_ranks = args.num_layers + embedding_and_loss - sum(of_ends), ranks - len(of_ends)
    return left % (left_ranks * stages or 1) > 0 or any(layers % stages for layers in of_ends)


RANK_GROUPS = (
    row(
        "--tensor-parallel-num-weight-shards above the TP size (GTP)",
        lambda args: (args.tensor_parallel_num_weight_shards or 1) > args.tensor_model_parallel_size,
        variables=("tensor_parallel_num_weight_shards",),
        cpu=NEEDS_TE,
        local_sgd=_GTP,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--expert-tensor-parallel-num-weight-shards above the ETP size (GTP)",
        lambda args: (
            (args.expert_tensor_parallel_num_weight_shards or 1)
            > (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
        ),
        variables=("expert_tensor_parallel_num_weight_shards",),
        cpu=NEEDS_TE,
        local_sgd=_GTP,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--hybrid-context-parallel",
        cpu=NEEDS_TE,
        local_sgd=refused("it makes groups of context-parallel ranks that would cross workers"),
        hot_switch=refused("it cuts rows in another way for every micro-batch"),
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--use-tp-pp-dp-mapping",
        cpu=tested(f"{BACKENDS}test_cpu_layouts.py::test_the_order_of_ranks_does_not_matter"),
        local_sgd=ROUNDS,
        hot_switch=tested(f"{STRATEGIES}test_stages.py::test_stages_before_replicas_change_nothing"),
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--use-nccl-ub",
        is_set("nccl_ub"),
        cpu=refused("it registers buffers with NCCL"),
        local_sgd=ON_GPU_ALONE,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--create-all-gather-group",
        cpu=OTHER_WAYS,
        local_sgd=_ALL_GATHER,
        hot_switch=_ALL_GATHER,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--nccl-communicator-config-path",
        cpu=refused("it configures NCCL"),
        local_sgd=refused("the groups inside and across workers would not get its settings"),
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--use-sharp",
        cpu=refused("it configures NCCL"),
        local_sgd=ON_GPU_ALONE,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--high-priority-stream-groups",
        cpu=refused("it configures NCCL"),
        local_sgd=ON_GPU_ALONE,
        hot_switch=ON_GPU_ALONE_HOT,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--disable-gloo-process-groups",
        says("use_gloo_process_groups", False),
        cpu=SAME,
        local_sgd=APART,
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--lazy-mpu-init",
        **everywhere(_NO_GROUPS),
    ),
    row(
        "--fake-process-group",
        **everywhere(_NOTHING_TRAINED),
    ),
    row(
        "--context-parallel-size above 1",
        _splits_sequences,
        cpu=needs_gpu(
            "Megatron's attention over a split sequence is in Transformer Engine alone",
            "use 1, or hot switching, which brings its own",
        ),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--distributed-backend nccl",
        says("distributed_backend", "nccl"),
        cpu=needs_gpu("NCCL moves GPU memory", "use gloo, the default here"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--pipeline-model-parallel-comm-backend",
        given("pipeline_model_parallel_comm_backend"),
        cpu=needs_gpu("NCCL and UCC move GPU memory"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--use-ring-exchange-p2p",
        cpu=needs_gpu("it needs a torch that was built with ring exchange"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--tp-comm-overlap",
        cpu=NO_TE_ON_CPU,
        local_sgd=ON_A_GPU,
        hot_switch=refused("its buffers are made for home's tensor parallel ranks"),
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.tp_comm_overlap",),
    ),
    row(
        "--distributed-backend gloo",
        says("distributed_backend", "gloo"),
        cpu=BARE,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        cpu_default={"distributed_backend": "gloo"},
    ),
    row(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        given("microbatch_group_size_per_vp_stage"),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=_STAGES,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--hierarchical-context-parallel-sizes",
        cpu=needs_gpu("it is said to the attention of Transformer Engine, which needs a GPU"),
        local_sgd=ON_A_GPU,
        hot_switch=refused(
            "its sizes multiply to one context-parallel size, and strategies have different ones, whose ranks exchange "
            "keys and values at once"
        ),
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "virtual pipeline stages",
        lambda args: bool(args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=_STAGES,
        sync_service=PEERS_BUNDLE,
        flags=("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    ),
    row(
        "--num-virtual-stages-per-pipeline-rank that does not divide the layers of a rank",
        _cuts_layers_unequally,
        **everywhere(_UNEQUAL_CHUNKS),
    ),
    row(
        "uneven pipeline stages",
        lambda args: bool(
            args.decoder_first_pipeline_num_layers
            or args.decoder_last_pipeline_num_layers
            or args.account_for_embedding_in_pipeline_split
            or args.account_for_loss_in_pipeline_split
            or args.pipeline_model_parallel_layout
        ),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=_STAGES,
        sync_service=PEERS_BUNDLE,
        flags=(
            "--decoder-first-pipeline-num-layers",
            "--decoder-last-pipeline-num-layers",
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
            "--pipeline-model-parallel-layout",
        ),
    ),
    row(
        "--mtp-standalone",  # which Megatron sets itself where it reads stages by their layout
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_BUNDLE,
        sync_service=PEERS_BUNDLE,
    ),
)
