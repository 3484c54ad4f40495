# SPDX-License-Identifier: Apache-2.0
"""Validation losses of options of the outer round, each held against the same training without it.

    python -m benchmarks.outer_methods STUDY [--json FILE]

Trains a small GPT on the source code of Python's standard library with examples/pretrain_gpt.py, for the same tokens
with every method of a study. A run that is finished is not made again. docs/convergence.md tells what came out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command_line import add_report_option, add_seeds_option, benchmark_parser, folder_for_output
from benchmarks.common import Case, report
from benchmarks.convergence.__main__ import prepare_corpus
from benchmarks.convergence.figures import draw_convergence
from benchmarks.convergence.results import compare, write
from benchmarks.convergence.runs import finished_runs, make, make_missing_of
from benchmarks.convergence.settings import Method, Noise, Run, Study
from benchmarks.muloco_convergence import losses_table, sizes
from tests.support.distributed import REPOSITORY
from tests.support.presets import Options

INTERVAL = 8
"""Steps between two rounds."""

ITERATIONS = 768
"""Of every run; a quarter of them is synchronous, so that there are 72 rounds."""

ROUNDS = (ITERATIONS - ITERATIONS // 4) // INTERVAL

SEQUENCES = 16
"""Of a step of all workers together."""

INNER_RATE = 4e-3
"""Of Adam: the best for DiLoCo in MuLoCo's study, whose model this is."""

RATE, MOMENTUM = 0.7, 0.8


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is compared."""

    processes: int
    """Of every run."""

    methods: tuple[Method, ...]
    """The first one is what the others are held against."""


def _inner(rate: float) -> Options:
    """Return the options of a learning rate of the inner optimizer."""
    return {"lr": rate, "min_lr": rate / 10}


def _rounds(workers: int, **options: object) -> Options:
    """Return the options of training in rounds; those that are given come last."""
    found: dict[str, Any] = {
        **_inner(INNER_RATE),
        "use_local_sgd": True,
        "local_sgd_workers": workers,
        "local_sgd_sync_interval": INTERVAL,
        "outer_optimizer_lr": RATE,
        "outer_optimizer_momentum": MOMENTUM,
        **options,
    }
    for option in ("lr", "momentum"):
        if f"outer_optimizer_{option}_schedule" in found:
            del found[f"outer_optimizer_{option}"]
    return found


def _schedules(rounds: int) -> tuple[Method, ...]:
    """Return DiLoCo as it is, and with what changes over a number of rounds."""
    early, late = rounds // 6, rounds - rounds // 3
    warmup = f"1:0.1,{early}:{RATE}"
    # The last point says that the momentum is to stay where it is.
    falling = f"1:0.95,{early}:0.9,{rounds // 2}:{MOMENTUM},{rounds}:{MOMENTUM}"
    return (
        Method(name="constant", title=f"lr {RATE}, momentum {MOMENTUM}", options=_rounds(2)),
        Method(
            name="lr_warmup",
            title=f"lr 0.1 to {RATE} in {early} rounds",
            options=_rounds(2, outer_optimizer_lr_schedule=warmup),
        ),
        Method(
            name="lr_decay",
            title=f"lr {RATE} to 0.2 in the last {rounds - late} rounds",
            options=_rounds(2, outer_optimizer_lr_schedule=f"{late}:{RATE},{rounds}:0.2"),
        ),
        Method(
            name="momentum_decay",
            title=f"momentum 0.95 to {MOMENTUM} in {rounds // 2} rounds",
            options=_rounds(2, outer_optimizer_momentum_schedule=falling),
        ),
        Method(
            name="both",
            title="lr warm-up and momentum decay",
            options=_rounds(2, outer_optimizer_lr_schedule=warmup, outer_optimizer_momentum_schedule=falling),
        ),
    )


_ONE_WORKER = (
    Method(name="ordinary", title="ordinary training", options=_inner(INNER_RATE)),
    *(
        # An outer step with momentum goes further than the inner ones, as a larger learning rate does.
        Method(name=f"ordinary_lr{rate:g}", title=f"ordinary, lr {rate:g}", options=_inner(rate))
        for rate in (6e-3, 8e-3)
    ),
    *(
        Method(
            name=f"nesterov_h{interval}",
            title=f"one worker, H = {interval}, Nesterov",
            options=_rounds(1, local_sgd_sync_interval=interval),
        )
        for interval in (INTERVAL, 4 * INTERVAL)
    ),
    Method(
        name="lookahead",
        title=f"one worker, H = {INTERVAL}, Lookahead (lr 0.5)",
        options=_rounds(1, outer_optimizer_lr=0.5, outer_optimizer_momentum=0.0),
    ),
)

_SPARSE = (
    Method(name="momentum", title=f"fp32, lr {RATE}, momentum {MOMENTUM}", options=_rounds(2)),
    *(
        # What is kept back acts like momentum, so that there is no other.
        Method(
            name=codec,
            title=f"{codec}, lr 1, no momentum",
            options=_rounds(2, outer_optimizer_lr=1.0, outer_optimizer_momentum=0.0, **options),
        )
        for codec, options in (
            ("fp32", {}),
            ("topk", {"local_sgd_codec": "topk"}),
            ("topk2", {"local_sgd_codec": "topk2"}),
        )
    ),
)

STUDIES = {
    "schedules": Question(processes=2, methods=_schedules(ROUNDS)),
    "one-worker": Question(processes=1, methods=_ONE_WORKER),
    "sparse": Question(processes=2, methods=_SPARSE),
}
"""By their names."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs of a study that are missing, and report on all that there are."""
    options = parser().parse_args(arguments)
    question = STUDIES[options.study]
    output = options.output or REPOSITORY / "outputs" / "outer_methods" / options.study
    study = Study(
        output=output.resolve(),
        iterations=ITERATIONS,
        evaluation=ITERATIONS // 8,
        methods=question.methods,
        noise=Noise(methods=()),
        processes=question.processes,
        overrides={**sizes(), "global_batch_size": SEQUENCES},
    )
    prepare_corpus(study)
    make_missing_of(study, _runs(study, options.seeds), make)
    report_on(study, options.seeds, options.json)
    return 0


def _runs(study: Study, seeds: Sequence[int]) -> list[Run]:
    return [Run(method=method, seed=seed) for seed in seeds for method in study.methods]


def report_on(study: Study, seeds: Sequence[int], json_file: Path | None) -> list[Case]:
    """Print the table, write results.json, table.md and the picture, from the runs that are finished."""
    results = finished_runs(study, _runs(study, seeds))
    print()
    cases = compare(study, results, seeds)
    write(study, results, study.output / "results.json")
    table = losses_table(study, results, seeds, against=study.methods[0].title)
    (study.output / "table.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    draw_convergence(study, results, seeds, study.output / "convergence.png")
    report(cases, json_file)
    print(f"results.json, table.md and convergence.png are in {study.output}")
    return cases


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    found = benchmark_parser("outer_methods", __doc__)
    found.add_argument("study", choices=list(STUDIES), help="what is compared")
    add_seeds_option(found, "every method")
    found.add_argument(
        "--output",
        type=folder_for_output,
        help="folder for corpus, runs, results.json, table.md and picture (outputs/outer_methods/STUDY)",
    )
    add_report_option(found)
    return found


if __name__ == "__main__":
    sys.exit(main())
