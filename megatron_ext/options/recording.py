# SPDX-License-Identifier: Apache-2.0
"""Rows on what is recorded of a run."""

from __future__ import annotations

from megatron_ext.options.common_verdicts import (
    BOOKKEEPING,
    BUNDLE,
    HOT_BOOKKEEPING,
    HOT_SAME,
    NO_TE_ON_CPU,
    ON_A_GPU,
    OWN_SCRIPT,
    PEER_ON_A_GPU,
    PEERS_BUNDLE,
    SAME,
    WORKERS,
    WORKERS_BOOKKEEPING,
)
from megatron_ext.options.row import given, row
from megatron_ext.options.verdict import accepted, needs_gpu, refused, tested

__all__ = ["RECORDING"]

_NO_TRAINING = accepted("a script that does not train has no use for it")
_NO_LOG = refused(
    "Megatron divides by it after the first step, and fails",
    "give the number of iterations from one line of the log to the next",
)
_NO_EVALUATION = refused(
    "Megatron divides by it where it counts the samples of evaluations, and fails, with --eval-iters 0 too",
    "give a number of iterations",
)

RECORDING = (
    row(
        "--log-max-attention-logit",
        cpu=NO_TE_ON_CPU,
        local_sgd=tested(
            f"{WORKERS}test_attention_logits.py::test_a_worker_goes_by_its_own_logits_as_a_stock_job_does"
        ),
        hot_switch=refused("it would see the logits of home's rows only"),
        sync_service=PEER_ON_A_GPU,
        in_config=("transformer.log_max_attention_logit",),
    ),
    row(
        "--log-interval 0",
        lambda args: args.log_interval == 0,
        cpu=_NO_TRAINING,
        local_sgd=_NO_LOG,
        hot_switch=_NO_LOG,
        sync_service=_NO_LOG,
    ),
    row(
        "--eval-interval 0, or none",
        # A resumed run divides by it whatever else is given.
        lambda args: not (args.eval_interval or ((args.full_validation or args.skip_train) and not args.load)),
        cpu=_NO_TRAINING,
        local_sgd=_NO_EVALUATION,
        hot_switch=_NO_EVALUATION,
        sync_service=_NO_EVALUATION,
    ),
    row(
        "--log-straggler",
        cpu=SAME,
        local_sgd=refused("its report gathers from all ranks, which makes the workers wait for each other"),
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--profile without --use-pytorch-profiler",
        lambda args: bool(args.profile and not args.use_pytorch_profiler),
        cpu=needs_gpu("Nsight records CUDA", "add --use-pytorch-profiler"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--record-memory-history",
        cpu=needs_gpu("the history is that of CUDA's allocator"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--log-energy",
        cpu=needs_gpu("the meters are those of NVIDIA's GPUs"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--gpu-sniff-test-interval",
        given("gpu_sniff_test_interval"),
        cpu=needs_gpu("the test times GPUs"),
        local_sgd=ON_A_GPU,
        hot_switch=ON_A_GPU,
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--moe-routing-trace-path",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=refused("it would trace the tokens of home's rows only"),
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--logits-load-dir",
        cpu=OWN_SCRIPT,
        local_sgd=OWN_SCRIPT,
        hot_switch=refused("it would compare the logits of home's rows only"),
        sync_service=OWN_SCRIPT,
    ),
    row(
        "--check-for-spiky-loss",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=refused("it would judge all losses by those of home's rows only"),
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--log-progress",
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
)
