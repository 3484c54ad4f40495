# SPDX-License-Identifier: Apache-2.0
"""Samples per second of four workers of which one is slow: synchronous, EDiT, A-EDiT.

    python -m benchmarks.straggler [--json FILE]

A step is a pause, as long as a GPU would compute while the processor waits, so that four workers do not fight for
the cores of a small machine. What is measured is who waits for whom. README.md tells what the figures say.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

import torch
import torch.distributed as dist

from benchmarks.command_line import (
    add_report_option,
    add_slow_by_option,
    at_least,
    benchmark_parser,
    number_above,
    require_memory,
)
from benchmarks.common import GUARDS, Case, print_table, report
from tests.support.distributed import run_ranks

WORKERS = 4
METHODS = ("synchronous", "edit", "a_edit")
LEAST_STEP_MS = 0.1
"""A shorter pause takes less than what is between two of them."""
SAMPLES = 8
"""Of one step of one worker."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One measurement, as every worker needs to know it."""

    step_seconds: float
    interval: int
    seconds: float
    """How long every method trains."""

    numel: int
    slow_by: int
    """How many times as long the last worker's step takes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one worker saw of one method."""

    steps: int
    seconds: float
    waited: list[float]
    """Seconds that it waited at each meeting."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every method at every slowness, and report."""
    options = parser().parse_args(arguments)
    longest = options.step_ms * max(options.slow_by) / 1e3
    if longest > options.seconds:
        parser().error(
            f"--seconds {options.seconds:g}: a step of the slow worker takes {longest:g} s; train for longer"
        )
    # Of every worker: weights, gradients, anchor, momentum and the sum.
    require_memory(parser(), "--numel", WORKERS * 5 * 4 * options.numel)
    rows, cases = [], []
    for slow_by in options.slow_by:
        plan = Plan(
            step_seconds=options.step_ms / 1e3,
            interval=options.interval,
            seconds=options.seconds,
            numel=options.numel,
            slow_by=slow_by,
        )
        outcomes = run_ranks(measured, WORKERS, plan, timeout=300 + 2 * len(METHODS) * plan.seconds)
        ideal = SAMPLES / plan.step_seconds * (WORKERS - 1 + 1 / slow_by)
        rates = {}
        for method in METHODS:
            found = [outcome[method] for outcome in outcomes]
            rates[method] = sum(SAMPLES * one.steps for one in found) / max(one.seconds for one in found)
            rows.append((f"{slow_by} x", method, f"{rates[method]:.0f}", f"{rates[method] / ideal:.2f}"))
        slow_step = plan.step_seconds * slow_by
        waited = [wait / slow_step for outcome in outcomes for wait in outcome["a_edit"].waited]
        cases += [_speedup(method, slow_by, rates) for method in METHODS[1:]]
        cases.append(
            Case(
                case=f"a_edit_wait_in_slow_steps_x{slow_by}",
                value=statistics.median(waited),
                unit="steps",
                goal=1.0,
                direction="lower",
            )
        )
    print(f"{WORKERS} workers, a step of {options.step_ms:g} ms, interval {options.interval}; one worker is slower\n")
    print_table(("slower by", "method", "samples/s", "of what all could do"), rows)
    print()
    report(cases, options.json)
    return 0


def measured(plan: Plan) -> dict[str, Outcome]:
    """Be one worker, with every method in turn."""
    dist.init_process_group("gloo")
    return {method: _train(method, plan) for method in METHODS}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    found = benchmark_parser("straggler", __doc__)
    add_slow_by_option(found)
    found.add_argument(
        "--step-ms",
        type=number_above(LEAST_STEP_MS, 1e6),
        default=20.0,
        help="milliseconds of a step of the others (20)",
    )
    found.add_argument("--interval", type=at_least(1), default=16, help="steps of EDiT's interval (16)")
    found.add_argument(
        "--seconds", type=number_above(0, 86_400), default=20.0, help="seconds of training of each method (20)"
    )
    found.add_argument("--numel", type=at_least(1, 10**12), default=100_000, help="parameters (100000)")
    add_report_option(found)
    return found


def _speedup(method: str, slow_by: int, rates: dict[str, float]) -> Case:
    return Case(
        case=f"{method}_over_synchronous_x{slow_by}",
        value=rates[method] / rates["synchronous"],
        unit="ratio",
        goal=None,
        direction="higher",
    )


def _train(method: str, plan: Plan) -> Outcome:
    """Train one worker for the plan's time."""
    from megatron_ext.local_sgd import LocalSGDConfig
    from megatron_ext.local_sgd.plain_torch import OuterOptimPeriodicModelAverager

    rank = dist.get_rank()
    pause = plan.step_seconds * (plan.slow_by if rank == WORKERS - 1 else 1)
    value, gradient = torch.zeros(plan.numel), torch.zeros(plan.numel)
    rounds: dict[str, dict[str, Any]] = {"edit": {"local_sgd_sync_interval": plan.interval}, "a_edit": {}}
    if method == "a_edit":
        # The fast workers' time of EDiT's interval.
        window = plan.interval * plan.step_seconds
        rounds["a_edit"] = {"use_async": True, "local_sgd_sync_time": window, "min_total_global_steps": 1}
    total = int(plan.seconds / plan.step_seconds * (WORKERS - 1 + 1 / plan.slow_by))
    averager: Any = None
    if method != "synchronous":
        averager = OuterOptimPeriodicModelAverager(
            local_sgd_config=LocalSGDConfig(**rounds[method], **GUARDS),
            total_global_steps=total if method == "a_edit" else None,
        )
        averager.attach([("value", value)])
    steps = int(plan.seconds / (plan.step_seconds * plan.slow_by))
    done, waited = 0, []
    dist.barrier()
    start = time.perf_counter()
    while done < steps if method != "a_edit" else not averager.finished:
        time.sleep(pause)
        done += 1
        if averager is None:
            dist.all_reduce(gradient)
            continue
        value += 1e-3 * (1 + rank)
        before, meetings = time.perf_counter(), len(averager.meetings)
        averager.average_parameters()
        if len(averager.meetings) > meetings:
            waited.append(time.perf_counter() - before)
    return Outcome(steps=done, seconds=time.perf_counter() - start, waited=waited)


if __name__ == "__main__":
    # By its module's name: the workers look the functions up where they were defined.
    from benchmarks.straggler import main as run

    sys.exit(run())
