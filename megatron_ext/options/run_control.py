# SPDX-License-Identifier: Apache-2.0
"""Rows on how a run ends and what watches it."""

from __future__ import annotations

from megatron_ext.options.common_verdicts import (
    AS_ANY_JOB,
    HOT_SAME,
    OPEN,
    RESILIENCY,
    SAME,
    UNTRIED,
    UNTRIED_HOT,
    WORKERS,
)
from megatron_ext.options.row import row
from megatron_ext.options.verdict import tested

__all__ = ["RUN_CONTROL"]

RUN_CONTROL = (
    row(
        "--exit-signal-handler",
        cpu=SAME,
        local_sgd=tested(f"{WORKERS}test_exit.py::test_a_signal_ends_all_workers_at_the_next_round_with_a_checkpoint"),
        hot_switch=HOT_SAME,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--exit-duration-in-mins",
        cpu=SAME,
        local_sgd=tested(f"{WORKERS}test_exit.py::test_a_time_limit_ends_all_workers_at_the_next_round"),
        hot_switch=HOT_SAME,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--inprocess-restart",
        cpu=RESILIENCY,
        local_sgd=RESILIENCY,
        hot_switch=RESILIENCY,
        sync_service=RESILIENCY,
    ),
    row(
        "--enable-ft-package",
        cpu=RESILIENCY,
        local_sgd=RESILIENCY,
        hot_switch=RESILIENCY,
        sync_service=RESILIENCY,
    ),
    row(
        "--full-validation",
        cpu=OPEN,
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
        sync_service=AS_ANY_JOB,
    ),
    row(
        "--adlr-autoresume",
        cpu=OPEN,
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
        sync_service=AS_ANY_JOB,
    ),
)
