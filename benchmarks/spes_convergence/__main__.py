# SPDX-License-Identifier: Apache-2.0
"""Validation losses of SPES and of centralized training after the same tokens.

    python -m benchmarks.spes_convergence [--json FILE]

Trains a mixture of 16 experts (1.4 M parameters) on the source code of Python's standard library with
examples/pretrain_gpt.py: as one job, and as four peers that meet at a sync server and own four experts each, or more,
or all, from the beginning or after a centralized start (`--methods`). A run that is finished is not made again, so the
study can be interrupted, and made seed by seed. docs/spes.md tells what came out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import (
    MOST,
    EachOnce,
    add_report_option,
    add_seeds_option,
    benchmark_parser,
    folder_for_output,
)
from benchmarks.common import report
from benchmarks.convergence.__main__ import prepare_corpus
from benchmarks.convergence.figures import draw_convergence
from benchmarks.convergence.results import compare, write
from benchmarks.convergence.runs import finished_runs, make_missing_of
from benchmarks.convergence.settings import Run
from benchmarks.spes_convergence.runs import make
from benchmarks.spes_convergence.settings import INTERVAL, METHODS, SpesStudy
from tests.support.distributed import REPOSITORY

_STEP = 10 * INTERVAL
"""Iterations of which three tenths, a centralized start, are a whole number of intervals."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are asked for and missing, and report on all that there are."""
    options = parser().parse_args(arguments)
    study = SpesStudy(output=options.output.resolve(), iterations=options.iterations, sequences=options.sequences)
    prepare_corpus(study)
    make_missing(study, options.methods, options.seeds)
    report_on(study, options.seeds, options.json)
    return 0


def make_missing(study: SpesStudy, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Make the runs of these methods that are not finished, and say how they went."""
    # Seed by seed, so that an interrupted study has pairs.
    wanted = [Run(method=method, seed=seed) for seed in seeds for method in study.methods if method.name in methods]
    make_missing_of(study, wanted, make)


def report_on(study: SpesStudy, seeds: Sequence[int], json_file: Path | None) -> None:
    """Print the table, write results.json and the picture, from the runs that are finished."""
    results = finished_runs(study, [Run(method=method, seed=seed) for method in study.methods for seed in seeds])
    print()
    cases = compare(study, results, seeds)
    write(study, results, study.output / "results.json")
    draw_convergence(study, results, seeds, study.output / "convergence.png")
    report(cases, json_file)
    print(f"results.json and convergence.png are in {study.output}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the study's options."""
    found = benchmark_parser("spes_convergence", __doc__)
    names = [method.name for method in METHODS]
    found.add_argument(
        "--methods",
        nargs="+",
        action=EachOnce,
        choices=names,
        default=names,
        help="to run (all); the report is on all finished runs",
    )
    add_seeds_option(found, "every method")
    found.add_argument(
        "--iterations",
        type=_iterations,
        default=SpesStudy.iterations,
        help=f"of every run ({SpesStudy.iterations}); give another --output with another number",
    )
    found.add_argument(
        "--sequences",
        type=int,
        choices=(8, 16, 32),
        default=SpesStudy.sequences,
        help=f"of a peer's step ({SpesStudy.sequences}); give another --output with another number",
    )
    found.add_argument(
        "--output",
        type=folder_for_output,
        default=REPOSITORY / "outputs" / "spes" / "convergence",
        help="folder for corpus, runs, results.json and picture (outputs/spes/convergence)",
    )
    add_report_option(found)
    return found


def _iterations(text: str) -> int:
    """Return a number of iterations with which an interval ends, as with three tenths of it, and an evaluation comes.

    Peers have the same weights only where an interval has ended.
    """
    if not text.isdecimal() or not 0 < int(text) <= MOST or int(text) % _STEP:
        raise argparse.ArgumentTypeError(f"{text!r}: give a multiple of {_STEP}, such as 2000")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
