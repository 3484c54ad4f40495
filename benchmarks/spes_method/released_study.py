# SPDX-License-Identifier: Apache-2.0
"""Study `released`: the released comparison scaled down, in which every peer has the batch of the centralized job."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Case
from benchmarks.pictures import two_axes
from benchmarks.spes_method.outcomes import Outcome, lengths_of, outcome_of, write_outcomes
from benchmarks.spes_method.runs import Methods, Run, Runs

__all__ = ["METHODS", "study_released"]

INTERVAL = 5
ROUNDS = 200
GOAL = 1.03
SHARES = (0.7, 1.0, 1.4, 2.0)
"""Lengths of the centralized runs that say what a loss is worth in tokens."""

CENTRALIZED = Run(
    replicas=1,
    sequences=4,
    rate=4e-3,
    steps=INTERVAL * ROUNDS,
    warmup=20 * INTERVAL,
    seed=0,
    owners=1,
    common_gradients=True,
)
SPES = dataclasses.replace(
    CENTRALIZED,
    replicas=4,
    interval=INTERVAL,
    common_gradients=False,
    # As the released 9B: alpha .05, every fifth round, to nothing after two fifths of the training.
    merge_every=5 * INTERVAL,
    merge_alpha=0.05,
    merge_until=INTERVAL * ROUNDS * 2 // 5,
)
METHODS: Methods = {
    "centralized": ("centralized", CENTRALIZED),
    "spes": ("SPES", SPES),
    "spes_unmerged": ("SPES, nothing merged", dataclasses.replace(SPES, merge_every=0, merge_alpha=0.0, merge_until=0)),
}
"""What is compared; runs get a seed, and in `price` a rate."""


def study_released(
    output: Path, corpus: Path, seeds: Sequence[int], picture: Path, methods: Methods = METHODS
) -> list[Case]:
    """Make the runs that are missing, print the table, draw the picture.

    Args:
        output: folder of runs and figures.
        corpus: prefix of the tokens.
        seeds: of every method.
        picture: the PNG to write.
        methods: what is compared.
    """
    runs = Runs(output / "released", corpus)
    for seed in seeds:
        of_seed = {name: dataclasses.replace(run, seed=seed) for name, (_, run) in methods.items()}
        runs.make_missing([*of_seed.values(), *lengths_of(of_seed["centralized"], SHARES)])
    found = _outcomes(runs, seeds, methods)
    write_outcomes(found, output / "released.json")
    print("tokens worth: of those of the centralized job, as many as one peer has; four peers have four times as many")
    _draw(runs, seeds, found, picture, methods)
    return [one.case(GOAL if one.name == "spes" else None) for one in found if one.name != "centralized"]


def _outcomes(runs: Runs, seeds: Sequence[int], methods: Methods) -> list[Outcome]:
    """Return what the methods reached."""
    references = [dataclasses.replace(methods["centralized"][1], seed=seed) for seed in seeds]
    return [
        outcome_of(runs, name, title, [dataclasses.replace(run, seed=seed) for seed in seeds], references, SHARES)
        for name, (title, run) in methods.items()
    ]


def _draw(runs: Runs, seeds: Sequence[int], found: Sequence[Outcome], picture: Path, methods: Methods) -> None:
    with two_axes(picture) as (curves, ends):
        for place, outcome in enumerate(found):
            run = methods[outcome.name][1]
            measured = [runs.finished(dataclasses.replace(run, seed=seed)) for seed in seeds]
            losses = [one.validation for one in measured if one is not None]
            at = sorted(map(int, losses[0]))
            curves.plot(at, [statistics.median(loss[str(step)] for loss in losses) for step in at], label=outcome.title)
            ends.plot(outcome.percent, [place] * len(outcome.percent), "o", alpha=0.7)
        ends.axvline(100 * (GOAL - 1), color="black")
        ends.set_yticks(range(len(found)), [outcome.title for outcome in found])
        ends.set(xlabel="% above centralized (line: goal)", title="Validation loss at the end, every seed")
        curves.set(xlabel="step", ylabel="validation loss (nats per byte)", title="Median over seeds", ylim=(None, 3.0))
        curves.legend()
