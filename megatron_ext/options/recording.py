# SPDX-License-Identifier: Apache-2.0
"""Rows on what is recorded of a run."""

from __future__ import annotations

from megatron_ext.options.common_verdicts import AS_ANY_JOB, BUNDLE, HOT_SAME, NO_TE_ON_CPU, OPEN, SAME
from megatron_ext.options.row import given, row
from megatron_ext.options.verdict import needs_gpu, refused

__all__ = ["RECORDING"]

RECORDING = (
    row(
        "--log-max-attention-logit",
        cpu=NO_TE_ON_CPU,
        local_sgd=refused("it takes the maximum over all data-parallel ranks in every step"),
        hot_switch=refused("it would see the logits of home's rows only"),
        sync_service=AS_ANY_JOB,
        in_config=("transformer.log_max_attention_logit",),
    ),
    row(
        "--log-straggler",
        cpu=SAME,
        local_sgd=refused("its report gathers from all ranks, which makes the workers wait for each other"),
        hot_switch=HOT_SAME,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--profile without --use-pytorch-profiler",
        lambda args: bool(args.profile and not args.use_pytorch_profiler),
        cpu=needs_gpu("Nsight records CUDA", "add --use-pytorch-profiler"),
        local_sgd=OPEN,
        hot_switch=OPEN,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--record-memory-history",
        cpu=needs_gpu("the history is that of CUDA's allocator"),
        local_sgd=OPEN,
        hot_switch=OPEN,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--log-energy",
        cpu=needs_gpu("the meters are those of NVIDIA's GPUs"),
        local_sgd=OPEN,
        hot_switch=OPEN,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--gpu-sniff-test-interval",
        given("gpu_sniff_test_interval"),
        cpu=needs_gpu("the test times GPUs"),
        local_sgd=OPEN,
        hot_switch=OPEN,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--moe-routing-trace-path",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=refused("it would trace the tokens of home's rows only"),
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--logits-load-dir",
        cpu=OPEN,
        local_sgd=OPEN,
        hot_switch=refused("it would compare the logits of home's rows only"),
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--check-for-spiky-loss",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=refused("it would judge all losses by those of home's rows only"),
        sync_service=AS_ANY_JOB,
    ),
)
