# SPDX-License-Identifier: Apache-2.0
"""One outer round of the plain PyTorch engine against the same round of atorch, the official EDiT: time and memory.

    python benchmarks/vs_atorch.py [--json FILE]

The first start installs atorch from a package index into an environment of its own. README.md tells how the runs are
paired and what the figures do not say. With each pair go a bare all-reduce and a copy of the parameters at all ranks at
once: what a round could take at least is the all-reduce, and after it the bytes that the outer step has to touch at
that speed. The last column is how many times as fast as atorch such a round would be.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks import atorch_environment
from benchmarks.atorch_rounds import ATORCH, OURS, PENALTY, PLAIN, Memory, Setting, rank_memory, rank_times
from benchmarks.command_line import (
    add_model_options,
    add_report_option,
    add_rounds_options,
    benchmark_parser,
    folder_for_output,
    require_memory,
)
from benchmarks.common import Case, bootstrap_interval, print_table, report
from benchmarks.outer_sync import least_seconds
from benchmarks.ranks.outer_rounds import numel, shapes, units_of
from megatron_ext.errors import UserError
from tests.support.distributed import REPOSITORY, run_ranks

GOALS = {PLAIN: 3.0, PENALTY: 4.0}
RANKS_OF_A_WORKER = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every method and number of workers and report; return 2 when atorch is not available."""
    options = parser().parse_args(arguments)
    tensors = shapes(options.layers, options.hidden, options.vocab)
    model_bytes = 4 * numel(tensors)
    # Of every worker: a model, gradients and the round's state on both sides.
    require_memory(parser(), "--layers, --hidden, --vocab, --workers", 10 * model_bytes * max(options.workers))
    try:
        packages = atorch_environment.install(options.env)
    except UserError as error:
        print(f"vs_atorch: error: {error}", file=sys.stderr)
        return 2
    print(
        f"one outer round (sgd, Nesterov) of {model_bytes / 4e6:.1f} M fp32 parameters in {len(tensors)} tensors, "
        f"atorch {atorch_environment.RELEASE} against megatron_ext.local_sgd.plain_torch, {options.pairs} pairs\n"
    )
    cases, times, memories, held = [], [], [], []
    for method in options.methods:
        setting = Setting(
            shapes=tensors,
            units=units_of(tensors),
            method=method,
            pairs=options.pairs,
            warmup=options.warmup,
            atorch=str(packages),
        )
        for workers in options.workers:
            found, row = _speedup(workers, setting)
            cases += found
            times.append(row)
            for side in (ATORCH, OURS):
                memory = _memory(workers, setting, side)
                memories.append((method, str(workers), side, *_in_models(memory, model_bytes)))
                if side == OURS:
                    held.append(memory.held / model_bytes)
    head = ("method", "workers", "atorch ms", "ours ms", "speedup", "95 % interval", "range")
    print_table((*head, "least ms", "over least", "speedup of least"), times)
    print("\nmemory of a rank beside model and gradients, in sizes of the model\n")
    print_table(("method", "workers", "side", "between rounds", "at most in a round"), memories)
    # What is held must not depend on the method or the number of workers, so the worst of them counts.
    goal = 2 / RANKS_OF_A_WORKER + largest_unit(setting) / numel(tensors)
    cases.append(Case(case="held_models", value=max(held), unit="models", goal=round(goal, 3), direction="lower"))
    report(cases, options.json)
    return 0


def largest_unit(setting: Setting) -> int:
    """Return the number of elements of the largest unit."""
    return max(
        numel([shape for shape, of in zip(setting.shapes, setting.units, strict=True) if of == unit])
        for unit in set(setting.units)
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's options."""
    found = benchmark_parser("vs_atorch", __doc__)
    found.add_argument(
        "--env",
        type=folder_for_output,
        default=REPOSITORY / "outputs" / "vs_atorch" / "env",
        help="folder of the environment with atorch, made when it is not there (outputs/vs_atorch/env)",
    )
    add_rounds_options(found, list(GOALS))
    add_model_options(found, pairs=9)
    add_report_option(found)
    return found


def _speedup(workers: int, setting: Setting) -> tuple[list[Case], tuple[str, ...]]:
    by_rank = run_ranks(rank_times, workers, setting, timeout=1800)
    # A round is over when its slowest rank is.
    atorch, ours, reduces, copies = (
        [max(pair) for pair in zip(*(getattr(times, what) for times in by_rank), strict=True)]
        for what in (ATORCH, OURS, "reduces", "copies")
    )
    least = least_seconds(reduces, copies, workers, guarded=setting.method == PENALTY)
    over = statistics.median(own / bound for own, bound in zip(ours, least, strict=True))
    possible = statistics.median(theirs / bound for theirs, bound in zip(atorch, least, strict=True))
    speedups = [theirs / own for theirs, own in zip(atorch, ours, strict=True)]
    speedup = statistics.median(speedups)
    low, high = bootstrap_interval(speedups)
    name, goal = f"{setting.method}_w{workers}", GOALS[setting.method]
    cases = [
        Case(case=f"{name}_speedup", value=speedup, unit="ratio", goal=goal, direction="higher"),
        Case(case=f"{name}_over_least", value=over, unit="ratio", goal=None, direction="lower"),
        Case(case=f"{name}_speedup_of_least", value=possible, unit="ratio", goal=None, direction="higher"),
    ]
    return cases, (
        setting.method,
        str(workers),
        *(f"{statistics.median(seconds) * 1e3:.0f}" for seconds in (atorch, ours)),
        f"{speedup:.2f}",
        f"{low:.2f} - {high:.2f}",
        f"{min(speedups):.2f} - {max(speedups):.2f}",
        f"{1e3 * statistics.median(least):.0f}",
        f"{over:.2f}",
        f"{possible:.2f}",
    )


def _memory(workers: int, setting: Setting, side: str) -> Memory:
    """Measure one side in processes of its own; return the most of any rank."""
    by_rank = run_ranks(rank_memory, workers, setting, side, timeout=900)
    return Memory(held=max(rank.held for rank in by_rank), peak=max(rank.peak for rank in by_rank))


def _in_models(memory: Memory, model_bytes: int) -> tuple[str, str]:
    return f"{memory.held / model_bytes:.2f}", f"{memory.peak / model_bytes:.2f}"


if __name__ == "__main__":
    # By its module's name: the ranks look the functions up where they were defined.
    from benchmarks.vs_atorch import main as run

    sys.exit(run())
