# SPDX-License-Identifier: Apache-2.0
"""A training step with streamed rounds against the same step without any.

    python -m benchmarks.overlapped_step [--json FILE] [MEGATRON OPTIONS]

Two jobs of two workers stand side by side and take turns: one streams fragments while it trains, the other never meets.
A turn is one interval, so that it holds one round of every fragment. Options that are not listed below go to Megatron.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import add_report_option, at_least, benchmark_parser
from benchmarks.common import Case, bootstrap_interval, print_table, report
from benchmarks.ranks.jobs_by_turns import FAR_AWAY, WORKERS, Plan, compare_rank
from benchmarks.step_overhead import VOCABULARY, quartiles, require_sizes, said_by_a_rank
from tests.support.distributed import REPOSITORY, RankFailure, run_ranks
from tests.support.ports import free_ports
from tests.support.presets import toy_gpt

STREAMING, APART = 0, 1
"""The two sides."""
RATIO_GOAL = 1.05


@dataclass(frozen=True, kw_only=True)
class StreamingPlan(Plan):
    """The comparison: two jobs of local SGD."""

    streaming: tuple[str, ...]
    """The options of the side that meets."""

    def is_stock(self, side: int) -> bool:
        """Return that none of them is."""
        return False

    def command_line(self, side: int, iterations: int) -> tuple[str, ...]:
        """Return the script's arguments for the job of `side`."""
        batch = self.micro_batch_size * self.ranks_per_worker * WORKERS
        words = [*self.arguments, "--train-iters", str(iterations), "--global-batch-size", str(batch)]
        words += ["--use-local-sgd", "--local-sgd-workers", str(WORKERS)]
        apart = ("--local-sgd-sync-interval", str(FAR_AWAY))
        return (*words, *(self.streaming if side == STREAMING else apart))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and report."""
    options, megatron_options = parser().parse_known_args(arguments)
    require_sizes(parser(), options, processes=2 * WORKERS)
    if options.fragments > options.layers:
        parser().error(f"--fragments {options.fragments}: each needs a layer; give {options.layers} or less (--layers)")
    if options.delay >= options.interval:
        parser().error(f"--delay {options.delay}: a round is in flight for less than an interval; give less")
    try:
        case = measure(options, megatron_options)
    except RankFailure as failure:
        return said_by_a_rank("overlapped_step", failure)
    report([case], options.json)
    return 0


def measure(options: argparse.Namespace, megatron_options: Sequence[str] = ()) -> Case:
    """Run the comparison and print it; return the case.

    Args:
        options: of this benchmark.
        megatron_options: what Megatron gets besides.
    """
    streaming = {
        "--local-sgd-sync-interval": options.interval,
        "--local-sgd-fragments": options.fragments,
        "--local-sgd-fragment-sync-delay": options.delay,
        "--local-sgd-fragment-update-alpha": 0.5,
    }
    model = toy_gpt(
        num_layers=options.layers,
        hidden_size=options.hidden,
        seq_length=128,
        max_position_embeddings=128,
        micro_batch_size=4,
        vocab_size=VOCABULARY,
        log_interval=FAR_AWAY,
        global_batch_size=None,
        train_iters=None,
    )
    plan = StreamingPlan(
        arguments=(*model, *megatron_options),
        micro_batch_size=4,
        ranks_per_worker=1,
        blocks=1 + options.intervals,
        block=options.interval,
        ports=tuple(free_ports(2 * WORKERS)),
        script=str(REPOSITORY / "examples" / "pretrain_gpt.py"),
        stock_only=False,
        streaming=tuple(word for flag, value in streaming.items() for word in (flag, str(value))),
    )
    print(
        f"{WORKERS} workers with {options.fragments} fragments, interval {options.interval}, delay {options.delay}, "
        f"against {WORKERS} that never meet; {options.intervals} intervals of each, by turns\n"
    )
    return _compare(plan)


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's own options."""
    found = benchmark_parser("overlapped_step", __doc__, passes_on=True)
    found.add_argument("--intervals", type=at_least(1), default=12, help="measured intervals of each side (12)")
    found.add_argument("--interval", type=at_least(2), default=20, help="steps of an interval (20)")
    found.add_argument("--fragments", type=at_least(1), default=4, help="fragments of the model (4)")
    found.add_argument("--delay", type=at_least(0), default=2, help="steps that a round is in flight (2)")
    found.add_argument("--layers", type=at_least(1), default=4, help="layers of the model (4)")
    found.add_argument("--hidden", type=at_least(4), default=256, help="hidden size, a multiple of 4 (256)")
    add_report_option(found)
    return found


def _compare(plan: StreamingPlan) -> Case:
    outcomes = run_ranks(compare_rank, 2 * plan.side_processes, plan, timeout=3600)
    sides = [
        [
            statistics.mean(block) / plan.block
            # The first interval warms up.
            for block in list(zip(*[found.seconds for found in outcomes if found.side == side], strict=True))[1:]
        ]
        for side in (STREAMING, APART)
    ]
    ratios = [ours / apart for ours, apart in zip(*sides, strict=True)]
    ratio = statistics.median(ratios)
    low, high = bootstrap_interval(ratios)
    print_table(
        ("side", "median ms per iteration", "quartiles"),
        [
            (name, f"{statistics.median(times) * 1e3:.2f}", quartiles([time * 1e3 for time in times]))
            for name, times in zip(("streaming", "never meeting"), sides, strict=True)
        ],
    )
    print(f"\nmedian of {len(ratios)} paired ratios {ratio:.4f}, 95 % interval {low:.4f} - {high:.4f}\n")
    return Case(case="overlapped_step_ratio", value=ratio, unit="ratio", goal=RATIO_GOAL, direction="lower")


if __name__ == "__main__":
    # By its module's name: the ranks look the functions up where they were defined.
    from benchmarks.overlapped_step import main as run

    sys.exit(run())
