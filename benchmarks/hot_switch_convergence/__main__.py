# SPDX-License-Identifier: Apache-2.0
"""Validation losses of hot switching and of Megatron's own packed and padded training after as many tokens of a corpus.

    python -m benchmarks.hot_switch_convergence [--json FILE]

Trains a GPT of 1.0 M parameters on the functions and classes of Python's standard library, four processes each. All
keep documents apart in attention and positions. Packed rows cut documents anywhere; padded ones have one document each,
or a piece of a long one, as hot switching has them: as many in a step, which ones differs. All are validated on packed
rows, which begin anywhere in a document, and on documents that begin at their beginning. A run that is finished is not
made again. docs/hot-switch.md tells what came out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import add_report_option, add_seeds_option, benchmark_parser, folder_for_output
from benchmarks.common import Case, print_table, report
from benchmarks.convergence.results import compare
from benchmarks.convergence.runs import finished_runs, make_missing_of
from benchmarks.convergence.settings import Run
from benchmarks.hot_switch_convergence.corpus import prepare_corpus
from benchmarks.hot_switch_convergence.runs import make
from benchmarks.hot_switch_convergence.settings import HOT, PADDED, STOCK, HotSwitchStudy
from tests.support.distributed import REPOSITORY

_TOKENS_OF = {STOCK: 8177, PADDED: 8237}
"""Predicted in a step: what follows the end of a document, 550 tokens long on average, does not count."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are missing, and report on all that there are."""
    options = parser().parse_args(arguments)
    study = HotSwitchStudy(output=options.output.resolve())
    wanted = [Run(method=method, seed=seed) for seed in options.seeds for method in study.methods]
    prepare_corpus(study)
    make_missing_of(study, wanted, make)
    report_on(study, wanted, options.seeds, options.json)
    return 0


def report_on(study: HotSwitchStudy, wanted: Sequence[Run], seeds: Sequence[int], json_file: Path | None) -> None:
    """Print the tables, from the runs that are finished."""
    results = finished_runs(study, wanted)
    print()
    compare(study, results, seeds)
    cases = []
    for reference in (STOCK, PADDED):
        both = [[results.get(Run(method=method, seed=seed)) for method in (HOT, reference)] for seed in seeds]
        pairs = [(hot, other) for hot, other in both if hot and other]
        cases += [
            Case(
                case=f"hot_over_{reference.name}_{what}",
                value=statistics.median(getattr(hot, of) / getattr(other, of) for hot, other in pairs),
                unit="ratio",
                goal=HOT.goal,
                direction="lower",
            )
            for what, of in (("loss", "final"), ("documents_loss", "documents"))
            if pairs
        ]
    rows = []
    for run, measured in results.items():
        tokens = [entry["tokens"] for entry in measured.rounds] or [_TOKENS_OF[run.method]]
        curve = [f"{measured.validation[at]:.3f}" for at in sorted(measured.validation)]
        predicted = statistics.mean(tokens) * max(measured.validation)
        rows.append((run.method.title, str(run.seed), f"{predicted:,.0f}", *curve, f"{measured.documents:.3f}"))
    steps = {tuple(sorted(measured.validation)[:-1]) for measured in results.values()}
    points = [" / ".join(map(str, sorted(set(at)))) for at in zip(*steps, strict=True)]
    print()
    print_table(("method", "seed", "tokens", *(f"after {at}" for at in points), "at the end", "documents"), rows)
    print()
    report(cases, json_file)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the study's options."""
    found = benchmark_parser("hot_switch_convergence", __doc__)
    add_seeds_option(found, "all methods")
    found.add_argument(
        "--output",
        type=folder_for_output,
        default=REPOSITORY / "outputs" / "hot_switch_convergence",
        help="folder for corpus and runs (outputs/hot_switch_convergence)",
    )
    add_report_option(found)
    return found


if __name__ == "__main__":
    sys.exit(main())
