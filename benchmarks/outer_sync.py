# SPDX-License-Identifier: Apache-2.0
"""One outer round, plain and with EDiT's penalty, against a bare all-reduce of the same bytes on the same group; and
the bytes of compressed rounds against those of a ring all-reduce; a step with rounds against one without any.

    python benchmarks/outer_sync.py [--json FILE]

Both sides run in the same processes, pair by pair; README.md has figures. With each pair goes a copy of the parameters
at all ranks at once, which says how fast the memory is: what a round could take at least is the all-reduce, and after
it the bytes that the outer step has to touch at that speed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks import overlapped_step, wire_bytes
from benchmarks.command_line import (
    add_model_options,
    add_report_option,
    add_rounds_options,
    at_least,
    benchmark_parser,
    require_memory,
)
from benchmarks.common import Case, bootstrap_interval, print_table, report
from benchmarks.ranks.outer_rounds import PENALTY, PLAIN, Setting, Timing, numel, rank_timings, shapes
from tests.support.distributed import run_ranks

GOALS = {PLAIN: 1.25, PENALTY: 1.5}
PROCESSOR_GOAL = 1.3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every number of workers that was asked for and report."""
    options = parser().parse_args(arguments)
    tensors = shapes(options.layers, options.hidden, options.vocab)
    count = numel(tensors)
    # Of every worker: weights, anchor, momentum, message, and what is reduced and copied beside the rounds.
    require_memory(parser(), "--layers, --hidden, --vocab, --workers", 6 * 4 * count * max(options.workers))
    print(
        f"one outer round (sgd, Nesterov) of {count / 1e6:.1f} M fp32 parameters in {len(tensors)} tensors "
        f"against a flat all-reduce of {count * 4 / 2**20:.0f} MiB, {options.pairs} pairs\n"
    )
    cases, rows = [], []
    for method in options.methods:
        setting = Setting(shapes=tensors, pairs=options.pairs, warmup=options.warmup, method=method)
        for workers in options.workers:
            measured, row = _measure(workers, setting)
            cases += measured
            rows.append(row)
    head = (
        *("method", "workers", "all-reduce ms (CPU)", "round ms (CPU)", "ratio", "95 % interval", "range"),
        *("memory GB/s", "bytes/value", "least ms", "over least"),
    )
    print_table(head, rows)
    print()
    cases += wire_bytes.measure(max(options.workers))
    if options.overlapped_intervals:
        print()
        intervals = ["--intervals", str(options.overlapped_intervals)]
        cases.append(overlapped_step.measure(overlapped_step.parser().parse_args(intervals)))
    report(cases, options.json)
    return 0


def touched(workers: int, *, guarded: bool) -> float:
    """Return the bytes of memory that the outer step touches at a rank for each fp32 value of the model, at least.

    A rank owns one of `workers` parts. For each value of its own it reads all workers' values, reads and writes anchor
    and momentum, and writes the result. With the penalty the round's decisions are between passes: norms of all
    workers first, then the mean, whose norm is clipped, then the step.

    Args:
        workers: how many there are.
        guarded: whether it is a round with the penalty.
    """
    terms, anchor, momentum, result = 4 * workers, 4, 4, 4
    step = 2 * anchor + 2 * momentum + result
    if not guarded:
        return (terms + step) / workers
    return ((terms + anchor) + (terms + anchor + result) + (result + step)) / workers


COPIED = 4 + 4
"""Bytes of memory that a copy touches for each fp32 value."""


def least_seconds(reduces: Sequence[float], copies: Sequence[float], workers: int, *, guarded: bool) -> list[float]:
    """Return the seconds that a round could take at least, pair by pair.

    Args:
        reduces: seconds of a bare all-reduce of the model.
        copies: seconds of a copy of the model at all ranks at once.
        workers: how many there are.
        guarded: whether it is a round with the penalty.
    """
    share = touched(workers, guarded=guarded) / COPIED
    return [reduced + copied * share for reduced, copied in zip(reduces, copies, strict=True)]


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's options."""
    found = benchmark_parser("outer_sync", __doc__)
    add_rounds_options(found, list(GOALS))
    add_model_options(found, pairs=11)
    found.add_argument(
        "--overlapped-intervals",
        type=at_least(0),
        default=12,
        metavar="N",
        help="measured intervals of benchmarks/overlapped_step.py, which follows; 0 leaves it out (12)",
    )
    add_report_option(found)
    return found


def _measure(workers: int, setting: Setting) -> tuple[list[Case], tuple[str, ...]]:
    by_rank = run_ranks(rank_timings, workers, setting, timeout=900)
    reduces = _slowest([measured.reduces for measured in by_rank])
    rounds = _slowest([measured.rounds for measured in by_rank])
    ratios = [sync.wall / bare.wall for bare, sync in zip(reduces, rounds, strict=True)]
    ratio = statistics.median(ratios)
    low, high = bootstrap_interval(ratios)
    copies = _slowest([measured.copies for measured in by_rank])
    guarded = setting.method == PENALTY
    nbytes = touched(workers, guarded=guarded)
    least = least_seconds(
        [bare.wall for bare in reduces], [copy.wall for copy in copies], workers, guarded=guarded
    )
    over = statistics.median(sync.wall / bound for sync, bound in zip(rounds, least, strict=True))
    processor = statistics.median(sync.cpu / bare.cpu for sync, bare in zip(rounds, reduces, strict=True))
    speed = COPIED * numel(setting.shapes) / statistics.median(copy.wall for copy in copies)
    name, goal = f"{setting.method}_w{workers}", GOALS[setting.method]
    cases = [
        Case(case=f"{name}_ratio", value=ratio, unit="ratio", goal=goal, direction="lower"),
        Case(case=f"{name}_over_least", value=over, unit="ratio", goal=goal, direction="lower"),
        Case(case=f"{name}_processor_ratio", value=processor, unit="ratio", goal=PROCESSOR_GOAL, direction="lower"),
    ]
    return cases, (
        setting.method,
        str(workers),
        _milliseconds(reduces),
        _milliseconds(rounds),
        f"{ratio:.3f}",
        f"{low:.3f} - {high:.3f}",
        f"{min(ratios):.3f} - {max(ratios):.3f}",
        f"{speed / 1e9:.1f}",
        f"{nbytes:.1f}",
        f"{1e3 * statistics.median(least):.1f}",
        f"{over:.3f}",
    )


def _slowest(by_rank: list[list[Timing]]) -> list[Timing]:
    """Return per pair the wall time of the rank that took longest, and the mean processor time of a rank."""
    return [
        Timing(wall=max(timing.wall for timing in pair), cpu=statistics.mean(timing.cpu for timing in pair))
        for pair in zip(*by_rank, strict=True)
    ]


def _milliseconds(timings: list[Timing]) -> str:
    wall = statistics.median(timing.wall for timing in timings)
    cpu = statistics.median(timing.cpu for timing in timings)
    return f"{wall * 1e3:.1f} ({cpu * 1e3:.1f})"


if __name__ == "__main__":
    sys.exit(main())
