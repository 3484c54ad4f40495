# SPDX-License-Identifier: Apache-2.0
"""A training step of local SGD between two rounds against the same step of two unsynchronised stock jobs.

    python benchmarks/step_overhead.py [--json FILE] [MEGATRON OPTIONS]

Options that are not listed below go to Megatron, on both sides. Both sides live at the same time and take turns, block
by block, in the order ABBA; README.md has figures. Whether the goal is met is decided by the median of the paired
ratios, not by a bound of its interval.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import (
    MOST_PROCESSES,
    add_report_option,
    at_least,
    benchmark_parser,
    file_to_read,
    require_memory,
)
from benchmarks.common import Case, bootstrap_interval, print_table, report
from benchmarks.ranks.jobs_by_turns import (
    FAR_AWAY,
    LOCAL_SGD,
    STOCK,
    WORKERS,
    Plan,
    compare_rank,
    instrumented_rank,
    require_equal_weights,
)
from tests.support.distributed import REPOSITORY, RankFailure, run_ranks
from tests.support.ports import free_ports
from tests.support.presets import toy_gpt

RATIO_GOAL = 1.01
VOCABULARY = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison, then the instrumented run, and report."""
    options, megatron_options = parser().parse_known_args(arguments)
    require_sizes(parser(), options, processes=2 * WORKERS * options.ranks_per_worker)
    measured = -(-options.iterations // options.block)
    plan = Plan(
        arguments=(*_model(options), *megatron_options),
        micro_batch_size=options.micro_batch_size,
        ranks_per_worker=options.ranks_per_worker,
        blocks=options.warmup_blocks + measured,
        block=options.block,
        ports=tuple(free_ports(2 * WORKERS)),
        script=options.script,
        stock_only=options.stock_on_both_sides,
    )
    print(
        f"{WORKERS} {'stock jobs' if plan.stock_only else 'workers between two rounds'} against {WORKERS} stock jobs, "
        f"{plan.ranks_per_worker} rank(s) each; {measured} blocks of {plan.block} iterations per side, by turns\n"
    )
    try:
        cases = [_compare(plan, options.warmup_blocks)]
        if not plan.stock_only:
            cases += _instrumented(plan, options.instrumented_iterations)
    except RankFailure as failure:
        return said_by_a_rank("step_overhead", failure)
    if not plan.stock_only:
        report(cases, options.json)
    return 0


def require_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace, *, processes: int) -> None:
    """End the program where a model cannot be built, or is too large for this machine."""
    if options.hidden % 4:
        parser.error(f"--hidden {options.hidden}: give a multiple of 4, the number of attention heads")
    # Weights, gradients, two moments and the anchor.
    values = 12 * options.layers * options.hidden**2 + VOCABULARY * options.hidden
    require_memory(parser, "--layers, --hidden", processes * 5 * 4 * values)


def said_by_a_rank(name: str, failure: RankFailure) -> int:
    """Print why a process of a comparison has failed, which may be an option that Megatron refuses; return 1."""
    print(f"python -m benchmarks.{name}: error: {failure}", file=sys.stderr)
    return 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's own options."""
    found = benchmark_parser("step_overhead", __doc__, passes_on=True)
    found.add_argument("--iterations", type=at_least(1), default=240, help="measured iterations per side (240)")
    found.add_argument("--block", type=at_least(1), default=4, help="iterations of one turn (4)")
    found.add_argument("--warmup-blocks", type=at_least(0), default=5, help="turns before those, not counted (5)")
    found.add_argument(
        "--instrumented-iterations", type=at_least(1), default=100, help="iterations with instruments (100)"
    )
    found.add_argument(
        "--ranks-per-worker",
        type=at_least(1, MOST_PROCESSES // (2 * WORKERS)),
        default=1,
        help="ranks of a worker and of a job (1)",
    )
    found.add_argument("--layers", type=at_least(1), default=4, help="layers of the model (4)")
    found.add_argument("--hidden", type=at_least(4), default=128, help="hidden size, a multiple of 4 (128)")
    found.add_argument("--seq-length", type=at_least(1), default=128, help="tokens of a sample (128)")
    found.add_argument("--micro-batch-size", type=at_least(1), default=4, help="samples of a rank's step (4)")
    found.add_argument(
        "--stock-on-both-sides",
        action="store_true",
        help="compare stock with stock, which shows the comparison's own error; reports no cases",
    )
    found.add_argument(
        "--script",
        type=file_to_read,
        default=str(REPOSITORY / "examples" / "pretrain_gpt.py"),
        help="training script (the example's)",
    )
    add_report_option(found)
    return found


def _model(options: argparse.Namespace) -> list[str]:
    return toy_gpt(
        num_layers=options.layers,
        hidden_size=options.hidden,
        seq_length=options.seq_length,
        max_position_embeddings=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        vocab_size=VOCABULARY,
        log_interval=FAR_AWAY,
        # Off with local SGD; switched off here on both sides, so that only our own work is compared.
        rerun_mode="disabled",
        global_batch_size=None,
        train_iters=None,
    )


def _compare(plan: Plan, warmup: int) -> Case:
    outcomes = run_ranks(compare_rank, 2 * plan.side_processes, plan, timeout=3600)
    require_equal_weights(outcomes)
    sides = [
        [
            statistics.mean(block) / plan.block
            for block in zip(*[found.seconds for found in outcomes if found.side == side], strict=True)
        ][warmup:]
        for side in (LOCAL_SGD, STOCK)
    ]
    ratios = [ours / stock for ours, stock in zip(*sides, strict=True)]
    ratio = statistics.median(ratios)
    low, high = bootstrap_interval(ratios)
    names = ["stock, 2 jobs" if plan.is_stock(side) else "local SGD, 2 workers" for side in (LOCAL_SGD, STOCK)]
    print_table(
        ("side", "median ms per iteration", "quartiles"),
        [
            (name, f"{statistics.median(times) * 1e3:.2f}", quartiles([time * 1e3 for time in times]))
            for name, times in zip(names, sides, strict=True)
        ],
    )
    print(
        f"\nmedian of {len(ratios)} paired ratios {ratio:.4f}, 95 % interval {low:.4f} - {high:.4f}, quartiles "
        f"{quartiles(ratios, 4)}\n"
        "after the run the weights of both sides are equal, digest for digest\n"
    )
    return Case(case="step_time_ratio", value=ratio, unit="ratio", goal=RATIO_GOAL, direction="lower")


def _instrumented(plan: Plan, iterations: int) -> list[Case]:
    counts = run_ranks(instrumented_rank, plan.side_processes, plan, iterations, timeout=3600)
    microseconds = [seconds * 1e6 for count in counts for seconds in count.hook_seconds]
    calls = [calls for count in counts for calls in count.crossing_calls]
    print(
        f"with instruments, {iterations} iterations: {statistics.median(microseconds):.0f} us per step in our wrappers "
        f"(quartiles {quartiles(microseconds, 0)}), {sum(calls)} collectives or sends across workers in all"
    )
    return [
        Case(
            case="hook_microseconds_per_step",
            value=statistics.median(microseconds),
            unit="us",
            goal=None,
            direction="lower",
        ),
        Case(
            case="cross_worker_collectives_per_step",
            # The mean: a median would hide a collective that happens at few steps only.
            value=statistics.mean(calls),
            unit="calls",
            goal=0,
            direction="lower",
        ),
    ]


def quartiles(values: Sequence[float], digits: int = 2) -> str:
    """Return the middle half of the values, for people."""
    if len(values) < 2:
        return "-"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.{digits}f} - {high:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
