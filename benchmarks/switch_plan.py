# SPDX-License-Identifier: Apache-2.0
"""Seconds to plan all switches of a training step of a 32B model on 32, 256 and 1,024 ranks. Needs no GPU.

    python benchmarks/switch_plan.py [--json FILE]

A plan covers every rank; its figures (bytes, messages, memory) count as part of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import EachOnce, add_report_option, at_least, benchmark_parser
from benchmarks.common import Case, print_table, report
from megatron_ext.errors import UserError
from megatron_ext.hot_switch import ALGORITHMS, PRESETS, StrategyList, measure_plan, plan_switch, read_strategies
from megatron_ext.params import GptShape

# For each number of ranks HotSPa's list for 32 GPUs, with more replicas where there are more, and a list whose tensor
# parallel sizes lie further apart.
CHAINS = {
    32: (("1,16,2", "4,2,4", "2,8,2"), ("1,8,4", "8,1,4", "2,16,1")),
    256: (("8,16,2", "32,2,4", "16,8,2"), ("64,1,4", "16,16,1", "32,2,4")),
    1024: (("32,16,2", "128,2,4", "64,8,2"), ("256,1,4", "64,16,1", "128,2,4")),
}
GOALS = {32: 0.5, 256: 3.0, 1024: 20.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every number of ranks that was asked for and report."""
    options = parser().parse_args(arguments)
    shape = PRESETS[options.model]
    lists = {ranks: [_read(texts, ranks, options.model) for texts in CHAINS[ranks]] for ranks in options.ranks}
    print(f"all switches of a step of {options.model}, senders: {options.algorithm}, {options.repeats} repeats\n")
    cases, rows = [], []
    for ranks in options.ranks:
        slowest = 0.0
        for texts, chosen in zip(CHAINS[ranks], lists[ranks], strict=True):
            seconds = [_seconds(shape, chosen, options.algorithm) for _ in range(options.repeats)]
            median = statistics.median(seconds)
            slowest = max(slowest, median)
            chain = " > ".join((*texts, texts[0]))
            rows.append((chain, str(ranks), f"{median:.3f}", f"{min(seconds):.3f} - {max(seconds):.3f}"))
        cases.append(
            Case(case=f"plan_seconds_{ranks}", value=slowest, unit="seconds", goal=GOALS[ranks], direction="lower")
        )
    print_table(("chain", "ranks", "median s", "range"), rows)
    print("\nEach case is the slower of its two chains.")
    report(cases, options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = benchmark_parser("switch_plan", __doc__)
    result.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        action=EachOnce,
        choices=tuple(CHAINS),
        default=list(CHAINS),
        help="jobs to plan",
    )
    result.add_argument("--model", choices=tuple(PRESETS), default="llama-32b", help="default %(default)s")
    result.add_argument("--algorithm", choices=tuple(ALGORITHMS), default="balanced", help="default %(default)s")
    result.add_argument("--repeats", type=at_least(1), default=5, help="chains planned per case (default %(default)s)")
    add_report_option(result)
    return result


def _read(texts: Sequence[str], ranks: int, model: str) -> StrategyList:
    """Return the strategies of a chain, or end the program where the model cannot have them."""
    try:
        return read_strategies(texts, shape=PRESETS[model])
    except UserError as error:
        parser().error(f"--model {model}, --ranks {ranks}: {error}")


def _seconds(shape: GptShape, chosen: StrategyList, algorithm: str) -> float:
    start = time.perf_counter()
    for source, target in chosen.switches:
        plan = plan_switch(shape, source.layout(shape.num_layers), target.layout(shape.num_layers), algorithm=algorithm)
        measure_plan(plan)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
