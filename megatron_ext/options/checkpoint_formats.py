# SPDX-License-Identifier: Apache-2.0
"""Rows on the formats of checkpoints, and on how ranks write and read them together."""

from __future__ import annotations

from megatron_ext.options.common_verdicts import (
    ASYNC_SAVE,
    BOOKKEEPING,
    CONTINUES,
    CONVERTED,
    EXPERTS,
    EXPERTS_ASYNC_SAVE,
    HOT_ASYNC_SAVE,
    HOT_BOOKKEEPING,
    HOT_CONVERTED,
    HOT_OTHER_WAYS,
    HOT_RESUME,
    OTHER_WAYS,
    PEERS,
    PEERS_ASYNC_SAVE,
    PEERS_BUNDLE,
    RESUME,
    STRATEGIES,
    WORKERS,
    WORKERS_BOOKKEEPING,
    WORKERS_OTHER_WAYS,
)
from megatron_ext.options.row import Asked, differs, everywhere, row, says
from megatron_ext.options.verdict import accepted, refused, tested

__all__ = ["CHECKPOINT_FORMATS"]

_RAISE_UNEXPECTED = "use raise_unexpected, which checks that nothing is missing"
_ASKS_FOR_LESS = refused("Megatron's own checkpoints have keys that it does not ask for", _RAISE_UNEXPECTED)
_RETURNS = refused("Megatron's own load takes what it returns besides for the state", "use log_all")
_BY_FORMAT = accepted("each format has a row of its own")
_PEERS_FORMAT = accepted("the row on formats other than torch_dist and torch has the say")
_TORCH_DIST = "use --ckpt-format torch_dist, the default"
_IN_THE_RUN = refused("Megatron writes this format in the run itself, as a file per rank", _TORCH_DIST)


def _in_legacy_format(name: str) -> Asked:
    return lambda args: args.ckpt_format == "torch" and bool(getattr(args, name))


CHECKPOINT_FORMATS = (
    row(
        "--ckpt-format torch_dist",
        says("ckpt_format", "torch_dist"),
        cpu=RESUME,
        local_sgd=CONTINUES,
        hot_switch=HOT_RESUME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ckpt-format torch",
        says("ckpt_format", "torch"),
        cpu=RESUME,
        local_sgd=tested(f"{WORKERS}test_legacy_format.py::test_a_resume_follows_the_uninterrupted_run_bit_for_bit"),
        hot_switch=tested("tests/hot_switch/test_checkpoints.py::test_a_resumed_run_ends_with_the_same_bits"),
        sync_service=tested(f"{PEERS}test_legacy_format.py::test_a_killed_peer_resumes_with_the_same_bits"),
        spes=tested(f"{EXPERTS}test_legacy_format.py::test_a_killed_peer_resumes_with_the_same_bits"),
    ),
    *(
        row(
            f"--ckpt-format torch with {flag}",
            _in_legacy_format(name),
            flags=("--ckpt-format", flag),
            **everywhere(_IN_THE_RUN),
        )
        for name, flag in (("async_save", "--async-save"), ("non_persistent_ckpt_type", "--non-persistent-ckpt-type"))
    ),
    *(
        row(
            f"--ckpt-format {name}",
            says("ckpt_format", name),
            cpu=refused(reason, _TORCH_DIST),
            local_sgd=refused(reason, _TORCH_DIST),
            hot_switch=refused(reason, _TORCH_DIST),
            sync_service=_PEERS_FORMAT,
        )
        for name, reason in (
            ("torch_dcp", "it is for --use-torch-fsdp2, and Megatron 0.19 cannot read what it writes in it"),
            ("fsdp_dtensor", "it is for --use-megatron-fsdp"),
            ("zarr", "Megatron 0.19 does not have it any more"),
        )
    ),
    row(
        "--ckpt-format other than torch_dist and torch",
        differs("ckpt_format", "torch_dist", "torch"),
        cpu=_BY_FORMAT,
        local_sgd=_BY_FORMAT,
        hot_switch=_BY_FORMAT,
        sync_service=refused("where a peer is in the run has no place in it", "use --ckpt-format torch_dist"),
    ),
    row(
        "--ckpt-convert-format",
        cpu=CONVERTED,
        local_sgd=refused("the state of the workers would be lost", "convert in a run without --use-local-sgd"),
        hot_switch=HOT_CONVERTED,
        sync_service=tested(
            f"{PEERS}test_legacy_format.py"
            "::test_a_killed_peer_resumes_from_a_converted_checkpoint_with_the_same_bits"
        ),
    ),
    row(
        "--dist-ckpt-optim-fully-reshardable",
        cpu=RESUME,
        local_sgd=tested(f"{WORKERS}test_checkpoint.py::test_another_layout_loads_what_was_saved_reshardable"),
        hot_switch=tested(f"{STRATEGIES}test_checkpoints.py::test_another_home_resumes_from_a_reshardable_checkpoint"),
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--distrib-optim-fully-reshardable-mem-efficient",
        cpu=OTHER_WAYS,
        local_sgd=WORKERS_OTHER_WAYS,
        hot_switch=HOT_OTHER_WAYS,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ckpt-fully-parallel-load",
        cpu=RESUME,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ckpt-fully-parallel-load-exchange-algo gather_rounds or gather_object",
        differs("ckpt_fully_parallel_load_exchange_algo", "broadcast"),
        cpu=OTHER_WAYS,
        local_sgd=WORKERS_OTHER_WAYS,
        hot_switch=HOT_OTHER_WAYS,
        sync_service=PEERS_BUNDLE,
    ),
    *(
        row(
            f"--ckpt-fully-parallel-{way}-process-group ep_dp",
            says(f"ckpt_fully_parallel_{way}_process_group", "ep_dp"),
            cpu=OTHER_WAYS,
            local_sgd=WORKERS_OTHER_WAYS,
            hot_switch=HOT_OTHER_WAYS,
            sync_service=PEERS_BUNDLE,
        )
        for way in ("save", "load")
    ),
    row(
        "--no-ckpt-fully-parallel-save",
        says("ckpt_fully_parallel_save", False),
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--ckpt-assume-constant-structure",
        cpu=RESUME,
        local_sgd=tested(f"{WORKERS}test_checkpoint.py::test_a_structure_that_is_to_be_constant_may_change"),
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--dist-ckpt-save-pre-mcore-014",
        cpu=OTHER_WAYS,
        local_sgd=WORKERS_OTHER_WAYS,
        hot_switch=HOT_OTHER_WAYS,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--dist-ckpt-strictness raise_unexpected",
        says("dist_ckpt_strictness", "raise_unexpected"),
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--dist-ckpt-strictness raise_all",
        says("dist_ckpt_strictness", "raise_all"),
        cpu=_ASKS_FOR_LESS,
        local_sgd=refused("a worker asks for its own part of a checkpoint alone", _RAISE_UNEXPECTED),
        hot_switch=_ASKS_FOR_LESS,
        sync_service=_ASKS_FOR_LESS,
    ),
    row(
        "--dist-ckpt-strictness log_unexpected, log_all or ignore_all",
        says("dist_ckpt_strictness", "log_unexpected", "log_all", "ignore_all"),
        cpu=ASYNC_SAVE,
        local_sgd=tested(f"{WORKERS}test_strictness.py::test_a_resume_that_only_logs_differences_keeps_its_bits"),
        hot_switch=HOT_ASYNC_SAVE,
        sync_service=PEERS_ASYNC_SAVE,
        spes=EXPERTS_ASYNC_SAVE,
    ),
    row(
        "--dist-ckpt-strictness return_unexpected or return_all",
        says("dist_ckpt_strictness", "return_unexpected", "return_all"),
        **everywhere(_RETURNS),
    ),
    row(
        "--no-ckpt-load-validate-sharding-integrity",
        says("ckpt_load_validate_sharding_integrity", False),
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--dist-ckpt-workers",
        differs("dist_ckpt_workers", 1),
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--verify-integrity",
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
)
