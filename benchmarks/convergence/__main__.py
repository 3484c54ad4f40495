# SPDX-License-Identifier: Apache-2.0
"""Validation losses of synchronous training, DiLoCo and EDiT after the same tokens, and what noise does to them.

    python -m benchmarks.convergence [--json FILE]

Trains a GPT of 1.0 M parameters on the source code of Python's standard library with examples/pretrain_gpt.py, four
processes each. A run that is finished is not made again, so the study can be interrupted, and made method by method.
docs/convergence.md tells what it compares and what came out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import (
    MOST,
    MOST_SEED,
    EachOnce,
    add_report_option,
    add_seeds_option,
    at_least,
    benchmark_parser,
    folder_for_output,
)
from benchmarks.common import report
from benchmarks.convergence.figures import draw_convergence, draw_noise
from benchmarks.convergence.results import compare, noise_cases, write
from benchmarks.convergence.runs import finished_runs, make, make_missing_of
from benchmarks.convergence.settings import METHODS, Noise, Run, Study
from benchmarks.stdlib_corpus import tokenize_stdlib
from tests.support.distributed import REPOSITORY


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are asked for and missing, and report on all that there are."""
    options = parser().parse_args(arguments)
    if not options.seeds and not options.noise_seeds:
        parser().error("--seeds and --noise-seeds: without any there is nothing to train; give one")
    study = Study(
        output=options.output.resolve(), iterations=options.iterations, evaluation=options.evaluation_interval
    )
    if options.noise_seeds and study.noise_problem is not None:
        parser().error(f"{study.noise_problem}; make no runs with noise (--noise-seeds without a number)")
    prepare_corpus(study)
    make_missing(study, options.methods, options.seeds, options.noise_seeds)
    report_on(study, options.seeds, options.noise_seeds, options.json)
    return 0


def prepare_corpus(study: Study) -> None:
    """Tokenize the standard library, unless that was done.

    Raises:
        CalledProcessError: it failed, and has said why.
    """
    tokenize_stdlib(study.corpus)


def make_missing(study: Study, methods: Sequence[str], seeds: Sequence[int], noise_seeds: Sequence[int]) -> None:
    """Make the runs of these methods that are not finished, and say how they went."""
    wanted = [run for run in all_runs(study, seeds, noise_seeds) if run.method.name in methods]
    make_missing_of(study, wanted, make)


def report_on(study: Study, seeds: Sequence[int], noise_seeds: Sequence[int], json_file: Path | None) -> None:
    """Print the tables, write results.json and the pictures, from the runs that are finished."""
    results = finished_runs(study, all_runs(study, seeds, noise_seeds))
    print()
    write(study, results, study.output / "results.json")
    cases = compare(study, results, seeds) + noise_cases(study, results, noise_seeds)
    draw_convergence(study, results, seeds, study.output / "convergence.png")
    for seed in noise_seeds:
        pairs = {
            Run(method=method, seed=seed, noisy=noisy) for method in study.noise.methods for noisy in (False, True)
        }
        if pairs <= results.keys():
            draw_noise(study, results, seed, study.output / f"noise-seed{seed}.png")
    report(cases, json_file)
    print(f"results.json and pictures are in {study.output}")


def all_runs(study: Study, seeds: Sequence[int], noise_seeds: Sequence[int]) -> list[Run]:
    """Return every run of the study, in the order in which they are made."""
    runs = [Run(method=method, seed=seed) for method in study.methods for seed in seeds]
    return runs + [Run(method=method, seed=seed, noisy=True) for method in study.noise.methods for seed in noise_seeds]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the study's options."""
    found = benchmark_parser("convergence", __doc__)
    names = [method.name for method in METHODS]
    found.add_argument(
        "--methods",
        nargs="+",
        action=EachOnce,
        choices=names,
        default=names,
        help="to run (all); the report is on all finished runs",
    )
    add_seeds_option(found, "every method", nargs="*")
    found.add_argument(
        "--noise-seeds",
        type=at_least(1, MOST_SEED),
        nargs="*",
        action=EachOnce,
        default=[1],
        help="of the runs with noise (1)",
    )
    found.add_argument(
        "--iterations",
        type=_iterations,
        default=Study.iterations,
        help=f"of every run ({Study.iterations}); give another --output with another number",
    )
    found.add_argument(
        "--evaluation-interval",
        type=_evaluation,
        default=Study.evaluation,
        help=f"iterations between evaluations ({Study.evaluation}); give another --output with another number",
    )
    found.add_argument(
        "--output",
        type=folder_for_output,
        default=REPOSITORY / "outputs" / "convergence",
        help="folder for corpus, runs, results.json and pictures (outputs/convergence)",
    )
    add_report_option(found)
    return found


def _iterations(text: str) -> int:
    """Return a number of iterations at which the intervals of all methods end, a quarter of them synchronous."""
    longest = max(int(str(method.options.get("local_sgd_sync_interval", 1))) for method in METHODS)
    if not text.isdecimal() or not 0 < int(text) <= MOST or int(text) % (4 * longest):
        raise argparse.ArgumentTypeError(f"{text!r}: give a multiple of {4 * longest}, such as 2048")
    return int(text)


def _evaluation(text: str) -> int:
    """Return a number of iterations between evaluations of which one is where the study looks for recovery."""
    at = Noise().recovered
    if not text.isdecimal() or int(text) < 1 or at % int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a divisor of {at}, such as 16")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
