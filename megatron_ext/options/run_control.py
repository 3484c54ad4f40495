# SPDX-License-Identifier: Apache-2.0
"""Rows on how a run ends and what watches it."""

from __future__ import annotations

from megatron_ext.options.common_verdicts import (
    HOT_SAME,
    PEERS,
    PEERS_BUNDLE,
    RESILIENCY,
    SAME,
    WORKERS,
)
from megatron_ext.options.row import everywhere, row
from megatron_ext.options.verdict import refused, tested

__all__ = ["RUN_CONTROL"]

_ENDS = tested(
    f"{WORKERS}test_exit.py::"
    "test_one_rank_that_is_told_to_end_ends_all_workers_between_rounds_and_a_resume_keeps_the_bits"
)

_FAILS = refused(
    "Megatron 0.19 fails where it saves on request, for want of an argument", "use --exit-signal-handler"
)
_SEQUENCES = refused(
    "an evaluation reads batches of documents, and Megatron counts samples of constant length",
    "give the number of batches: --eval-iters",
)
_ONE_SET = refused(
    "Megatron 0.19 fails on it at the first evaluation", "add --multiple-validation-sets, which takes one set as well"
)
_FULL = tested(f"{WORKERS}test_evaluation.py::test_several_whole_validation_sets_are_split_over_all_workers")

RUN_CONTROL = (
    row(
        "--exit-signal-handler",
        cpu=SAME,
        local_sgd=_ENDS,
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--exit-duration-in-mins",
        cpu=SAME,
        local_sgd=_ENDS,
        hot_switch=HOT_SAME,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--inprocess-restart",
        **everywhere(RESILIENCY),
    ),
    row(
        "--enable-ft-package",
        **everywhere(RESILIENCY),
    ),
    row(
        "--full-validation",
        cpu=_FULL,
        local_sgd=_FULL,
        hot_switch=_SEQUENCES,
        sync_service=tested(
            f"{PEERS}test_evaluation.py::test_peers_evaluate_on_the_whole_validation_set_as_a_stock_job_does"
        ),
    ),
    row(
        "--full-validation without --multiple-validation-sets",
        lambda args: args.full_validation and not args.multiple_validation_sets,
        cpu=_ONE_SET,
        local_sgd=_ONE_SET,
        hot_switch=_SEQUENCES,
        sync_service=_ONE_SET,
    ),
    row(
        "--adlr-autoresume",
        **everywhere(_FAILS),
    ),
)
