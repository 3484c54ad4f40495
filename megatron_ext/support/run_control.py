# SPDX-License-Identifier: Apache-2.0
"""Rows on how a run ends and what watches it."""

from __future__ import annotations

from megatron_ext.support.row import option, refused, tested
from megatron_ext.support.verdicts import HOT_SAME, RESILIENCY, SAME, UNTRIED, UNTRIED_HOT, WORKERS

__all__ = ["RUN_CONTROL"]

RUN_CONTROL = (
    option(
        "--exit-signal-handler",
        cpu=SAME,
        local_sgd=tested(f"{WORKERS}test_exit.py::test_a_signal_ends_all_workers_at_the_next_round_with_a_checkpoint"),
        hot_switch=HOT_SAME,
    ),
    option(
        "--exit-duration-in-mins",
        cpu=SAME,
        local_sgd=tested(f"{WORKERS}test_exit.py::test_a_time_limit_ends_all_workers_at_the_next_round"),
        hot_switch=HOT_SAME,
    ),
    option("--inprocess-restart", cpu=RESILIENCY, local_sgd=RESILIENCY, hot_switch=RESILIENCY),
    option("--enable-ft-package", cpu=RESILIENCY, local_sgd=RESILIENCY, hot_switch=RESILIENCY),
    option("--full-validation", local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option("--adlr-autoresume", local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option(
        "--log-max-attention-logit",
        local_sgd=refused("it takes the maximum over all data-parallel ranks in every step"),
    ),
    option(
        "--moe-expert-rank-capacity-factor",
        local_sgd=refused("all ranks are asked in every step whether one has overflowed"),
        hot_switch=refused("which tokens are dropped would depend on the strategies"),
    ),
    option(
        "--sft",
        local_sgd=refused("the lengths of its packed samples are added up over all ranks in every step"),
    ),
    option(
        "--log-straggler",
        cpu=SAME,
        local_sgd=refused("its report gathers from all ranks, which makes the workers wait for each other"),
        hot_switch=UNTRIED_HOT,
    ),
)
