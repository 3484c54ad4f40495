# SPDX-License-Identifier: Apache-2.0
"""Rows on data parallelism and process groups."""

from __future__ import annotations

from megatron_ext.support.row import asks_for, option, refused, says, tested
from megatron_ext.support.verdicts import (
    APART,
    BACKENDS,
    HOT_SAME,
    HOT_STATIC,
    NEEDS_TE,
    SAME,
    STRATEGIES,
    UNTRIED,
    UNTRIED_HOT,
    UNTRIED_ON_CPU,
    WORKERS,
)

__all__ = ["DATA_PARALLEL"]

_LAYOUTS = tested(f"{BACKENDS}test_cpu_layouts.py::test_a_dense_layout_computes_what_one_rank_computes")
_BF16_SUMS = tested(f"{BACKENDS}test_cpu_table.py::test_gradients_reduced_in_bf16_and_summed_in_fp32")
_GROWS = tested(f"{BACKENDS}test_cpu_table.py::test_the_batch_grows")
_IGNORED = refused("Megatron 0.19 reads it and ignores it")
_GTP = refused("Megatron does not combine it with groups inside the data-parallel dimension")
_BUCKETS = tested(f"{STRATEGIES}test_training.py::test_bf16_stays_as_near_to_stock_as_rounding_allows")

DATA_PARALLEL = (
    option("--use-distributed-optimizer", cpu=_LAYOUTS, local_sgd=APART, hot_switch=HOT_STATIC),
    option("--overlap-grad-reduce", cpu=_LAYOUTS, local_sgd=APART, hot_switch=HOT_SAME),
    option("--overlap-param-gather", cpu=_LAYOUTS, local_sgd=APART, hot_switch=HOT_SAME),
    option("--ddp-bucket-size", cpu=_LAYOUTS, local_sgd=APART, hot_switch=_BUCKETS),
    option("--ddp-num-buckets", cpu=SAME, local_sgd=APART, hot_switch=HOT_SAME),
    option("--ddp-pad-buckets-for-high-nccl-busbw", cpu=SAME, local_sgd=APART, hot_switch=HOT_SAME),
    option("--no-align-grad-reduce", says("align_grad_reduce", False), cpu=SAME, local_sgd=APART, hot_switch=HOT_SAME),
    option(
        "--no-align-param-gather", says("align_param_gather", False), cpu=SAME, local_sgd=APART, hot_switch=HOT_SAME
    ),
    option(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        cpu=UNTRIED_ON_CPU,
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--ddp-average-in-collective",
        cpu=SAME,
        local_sgd=APART,
        hot_switch=refused("Megatron does not combine it with --calculate-per-token-loss, which hot switching sets"),
    ),
    option(
        "--grad-reduce-in-bf16",
        cpu=_BF16_SUMS,
        local_sgd=APART,
        hot_switch=refused("guests' gradients are added in fp32"),
    ),
    option("--ddp-reduce-scatter-with-fp32-accumulation", cpu=_BF16_SUMS, local_sgd=APART, hot_switch=UNTRIED_HOT),
    option("--calculate-per-token-loss", cpu=SAME, local_sgd=APART, hot_switch=HOT_STATIC),
    option(
        "--data-parallel-random-init",
        cpu=tested(f"{BACKENDS}test_cpu_table.py::test_random_weights_per_replica_are_made_equal"),
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--check-weight-hash-across-dp-replicas-interval",
        cpu=SAME,
        local_sgd=refused("between two rounds the workers' weights differ by design"),
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--moe-router-enable-expert-bias",
        local_sgd=tested(f"{WORKERS}test_expert_bias.py::test_a_round_takes_the_mean_of_the_workers_biases"),
    ),
    option(
        "--moe-router-load-balancing-type quantile_balancing",
        lambda args: "quantile_balancing" in args.moe_router_load_balancing_type,
        local_sgd=refused("its quantiles are averaged over all data-parallel ranks at every step"),
        sync_service=refused("what it keeps follows each peer's own tokens, and rounds do not merge it yet"),
    ),
    option(
        "--rampup-batch-size",
        cpu=_IGNORED,
        local_sgd=refused("Megatron 0.19 reads it and ignores it"),
        hot_switch=refused("Megatron 0.19 reads it and ignores it"),
    ),
    option(
        "--step-batch-size-schedule",
        cpu=_GROWS,
        local_sgd=UNTRIED,
        sync_service=refused("it counts the samples of the whole job, of which a peer makes a part"),
        hot_switch=UNTRIED_HOT,
    ),
    option("--decrease-batch-size-if-needed", local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option(
        "--num-distributed-optimizer-instances above 1",
        lambda args: args.num_distributed_optimizer_instances > 1,
        cpu=refused("Megatron's hierarchical groups need the einops package and have not been tested on gloo"),
        local_sgd=refused(
            "the workers take the place of the instances",
            "drop it: the optimizer is sharded inside each worker",
        ),
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--init-model-with-meta-device",
        cpu=refused("without FSDP Megatron leaves the weights without values"),
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--use-torch-fsdp2",
        cpu=refused("Megatron builds its device mesh for CUDA", "use --use-distributed-optimizer"),
        local_sgd=refused(
            "it shards the parameters over all data-parallel ranks, so no worker would have a whole model",
            "use --use-distributed-optimizer",
        ),
        hot_switch=refused("guests take whole parameters from home", "use --use-distributed-optimizer"),
    ),
    option(
        "--use-megatron-fsdp",
        cpu=refused("its buffers and streams are CUDA's", "use --use-distributed-optimizer"),
        local_sgd=refused("the outer step cannot write into its sharded parameters", "use --use-distributed-optimizer"),
        hot_switch=refused("guests take whole parameters from home", "use --use-distributed-optimizer"),
    ),
    option(
        "--tensor-parallel-num-weight-shards above the TP size (GTP)",
        lambda args: (args.tensor_parallel_num_weight_shards or 1) > args.tensor_model_parallel_size,
        cpu=NEEDS_TE,
        local_sgd=_GTP,
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--expert-tensor-parallel-num-weight-shards above the ETP size (GTP)",
        lambda args: (
            (args.expert_tensor_parallel_num_weight_shards or 1)
            > (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
        ),
        cpu=NEEDS_TE,
        local_sgd=_GTP,
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--hybrid-context-parallel",
        cpu=NEEDS_TE,
        local_sgd=refused("it makes groups of context-parallel ranks that would cross workers"),
        hot_switch=refused("it cuts rows in another way for every micro-batch"),
    ),
    option(
        "--use-tp-pp-dp-mapping",
        cpu=tested(f"{BACKENDS}test_cpu_layouts.py::test_the_order_of_ranks_does_not_matter"),
        local_sgd=UNTRIED,
        hot_switch=refused("strategies number their ranks in Megatron's default order"),
    ),
    option(
        "--use-nccl-ub",
        asks_for("nccl_ub"),
        cpu=refused("it registers buffers with NCCL"),
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
    option("--create-all-gather-group", cpu=UNTRIED_ON_CPU, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option(
        "--nccl-communicator-config-path",
        cpu=refused("it configures NCCL"),
        local_sgd=refused("the groups inside and across workers would not get its settings"),
        hot_switch=UNTRIED_HOT,
    ),
    option("--use-sharp", cpu=refused("it configures NCCL"), local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option(
        "--high-priority-stream-groups", cpu=refused("it configures NCCL"), local_sgd=UNTRIED, hot_switch=UNTRIED_HOT
    ),
    option(
        "--disable-gloo-process-groups",
        says("use_gloo_process_groups", False),
        cpu=SAME,
        local_sgd=APART,
        hot_switch=HOT_SAME,
    ),
    option(
        "--lazy-mpu-init",
        cpu=refused("Megatron's process groups would never be built"),
        local_sgd=refused("Megatron's process groups would never be built"),
        hot_switch=refused("Megatron's process groups would never be built"),
    ),
    option(
        "--fake-process-group",
        cpu=refused("nothing would be trained"),
        local_sgd=refused("nothing would be trained"),
        hot_switch=refused("nothing would be trained"),
    ),
)
