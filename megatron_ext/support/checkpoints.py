# SPDX-License-Identifier: Apache-2.0
"""Rows on checkpoints."""

from __future__ import annotations

from megatron_ext.support.row import differs, option, refused, says, tested
from megatron_ext.support.verdicts import (
    BACKENDS,
    BOOKKEEPING,
    CONTINUES,
    HOT_BOOKKEEPING,
    HOT_RESUME,
    RESILIENCY,
    RESUME,
    STRATEGIES,
    UNTRIED,
    UNTRIED_HOT,
    UNTRIED_ON_CPU,
    WORKERS,
    WORKERS_BOOKKEEPING,
)

__all__ = ["CHECKPOINTS"]

_REPLACE = tested(f"{BACKENDS}test_cpu_table.py::test_non_persistent_checkpoints_replace_each_other")
_WEIGHTS = tested(f"{BACKENDS}test_cpu_resume.py::test_weights_alone_can_be_saved_and_loaded")
_FRESH = tested(
    f"{WORKERS}test_checkpoint.py::test_a_sync_point_loads_without_optimizer_state_and_starts_a_fresh_outer_one"
)
_HOT_WEIGHTS = tested(f"{STRATEGIES}test_checkpoints.py::test_the_weights_alone_begin_with_a_fresh_optimizer")
_HOT_FINETUNE = tested(f"{STRATEGIES}test_checkpoints.py::test_finetuning_begins_with_the_first_sequence")
_RAISE_UNEXPECTED = "use raise_unexpected, which checks that nothing is missing"
_TORCH_DIST = "use --ckpt-format torch_dist, the default"

CHECKPOINTS = (
    option(
        "--ckpt-format torch_dist",
        says("ckpt_format", "torch_dist"),
        cpu=RESUME,
        local_sgd=CONTINUES,
        hot_switch=HOT_RESUME,
    ),
    option(
        "--ckpt-format torch",
        says("ckpt_format", "torch"),
        cpu=RESUME,
        local_sgd=refused("the state of the workers has no place in it", _TORCH_DIST),
        hot_switch=refused(
            "it has not been tested with several strategies", "use --ckpt-format torch_dist, the default"
        ),
    ),
    *(
        option(
            f"--ckpt-format {name}",
            says("ckpt_format", name),
            cpu=refused(reason, _TORCH_DIST),
            local_sgd=refused(reason, _TORCH_DIST),
            hot_switch=refused(reason, _TORCH_DIST),
        )
        for name, reason in (
            ("torch_dcp", "it is for --use-torch-fsdp2"),
            ("fsdp_dtensor", "it is for --use-megatron-fsdp"),
            ("zarr", "Megatron 0.19 does not have it any more"),
        )
    ),
    option(
        "--ckpt-convert-format",
        cpu=UNTRIED_ON_CPU,
        local_sgd=refused("the state of the workers would be lost", "convert in a run without --use-local-sgd"),
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--dist-ckpt-optim-fully-reshardable",
        cpu=RESUME,
        local_sgd=tested(f"{WORKERS}test_checkpoint.py::test_another_layout_loads_what_was_saved_reshardable"),
        hot_switch=tested(f"{STRATEGIES}test_checkpoints.py::test_another_home_resumes_from_a_reshardable_checkpoint"),
    ),
    option(
        "--distrib-optim-fully-reshardable-mem-efficient", cpu=UNTRIED_ON_CPU, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT
    ),
    option("--ckpt-fully-parallel-load", cpu=RESUME, local_sgd=WORKERS_BOOKKEEPING, hot_switch=HOT_BOOKKEEPING),
    option(
        "--ckpt-fully-parallel-load-exchange-algo gather_rounds or gather_object",
        differs("ckpt_fully_parallel_load_exchange_algo", "broadcast"),
        cpu=UNTRIED_ON_CPU,
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
    *(
        option(
            f"--ckpt-fully-parallel-{way}-process-group ep_dp",
            says(f"ckpt_fully_parallel_{way}_process_group", "ep_dp"),
            cpu=UNTRIED_ON_CPU,
            local_sgd=UNTRIED,
            hot_switch=UNTRIED_HOT,
        )
        for way in ("save", "load")
    ),
    option(
        "--no-ckpt-fully-parallel-save",
        says("ckpt_fully_parallel_save", False),
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
    ),
    option(
        "--ckpt-assume-constant-structure",
        cpu=RESUME,
        local_sgd=refused("what a checkpoint holds changes from warm-up to rounds and within an interval"),
        hot_switch=HOT_BOOKKEEPING,
    ),
    option("--dist-ckpt-save-pre-mcore-014", cpu=UNTRIED_ON_CPU, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option(
        "--dist-ckpt-strictness raise_unexpected",
        says("dist_ckpt_strictness", "raise_unexpected"),
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
    ),
    option(
        "--dist-ckpt-strictness raise_all",
        says("dist_ckpt_strictness", "raise_all"),
        cpu=refused("Megatron's own checkpoints have keys that it does not ask for", _RAISE_UNEXPECTED),
        local_sgd=refused("a worker asks for its own part of a checkpoint alone", _RAISE_UNEXPECTED),
        hot_switch=refused("Megatron's own checkpoints have keys that it does not ask for", _RAISE_UNEXPECTED),
    ),
    option(
        "--dist-ckpt-strictness log_unexpected, log_all, return_unexpected, return_all or ignore_all",
        differs("dist_ckpt_strictness", "assume_ok_unexpected", "raise_unexpected", "raise_all"),
        cpu=UNTRIED_ON_CPU,
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--no-ckpt-load-validate-sharding-integrity",
        says("ckpt_load_validate_sharding_integrity", False),
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
    ),
    option(
        "--dist-ckpt-workers",
        differs("dist_ckpt_workers", 1),
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
    ),
    option("--verify-integrity", cpu=UNTRIED_ON_CPU, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option("--save-retain-interval", cpu=BOOKKEEPING, local_sgd=WORKERS_BOOKKEEPING, hot_switch=HOT_BOOKKEEPING),
    option("--no-save-rng", cpu=BOOKKEEPING, local_sgd=WORKERS_BOOKKEEPING, hot_switch=HOT_BOOKKEEPING),
    option("--no-load-rng", cpu=BOOKKEEPING, local_sgd=WORKERS_BOOKKEEPING, hot_switch=HOT_BOOKKEEPING),
    option(
        "--no-save-optim",
        cpu=_WEIGHTS,
        local_sgd=refused(
            "a checkpoint from the middle of an interval could not be resumed without the optimizers' states",
            "drop it, and load with --no-load-optim where the weights alone are wanted",
        ),
        hot_switch=UNTRIED_HOT,
    ),
    option("--no-load-optim", cpu=_WEIGHTS, local_sgd=_FRESH, hot_switch=_HOT_WEIGHTS),
    option("--finetune", cpu=_WEIGHTS, local_sgd=_FRESH, hot_switch=_HOT_FINETUNE),
    option("--pretrained-checkpoint", cpu=_WEIGHTS, local_sgd=_FRESH, hot_switch=UNTRIED_HOT),
    option("--load-main-params-from-ckpt", cpu=UNTRIED_ON_CPU, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option("--override-ckpt-iteration", cpu=UNTRIED_ON_CPU, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option("--use-checkpoint-args", cpu=BOOKKEEPING, local_sgd=WORKERS_BOOKKEEPING, hot_switch=UNTRIED_HOT),
    option("--use-mp-args-from-checkpoint-args", cpu=UNTRIED_ON_CPU, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option("--auto-detect-ckpt-format", cpu=BOOKKEEPING, local_sgd=WORKERS_BOOKKEEPING, hot_switch=HOT_BOOKKEEPING),
    option("--exit-on-missing-checkpoint", cpu=BOOKKEEPING, local_sgd=WORKERS_BOOKKEEPING, hot_switch=HOT_BOOKKEEPING),
    *(
        option(f"--save-{what}-interval", cpu=UNTRIED_ON_CPU, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT)
        for what in ("params", "activations", "tokens-per-expert", "wgrads", "dgrads")
    ),
    option(
        "--async-save",
        cpu=refused("Megatron's writer, a process of its own, picks a CUDA device"),
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--non-persistent-ckpt-type global",
        says("non_persistent_ckpt_type", "global"),
        cpu=_REPLACE,
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--non-persistent-ckpt-type local or in_memory",
        says("non_persistent_ckpt_type", "local", "in_memory"),
        cpu=RESILIENCY,
        local_sgd=RESILIENCY,
        hot_switch=RESILIENCY,
    ),
)
