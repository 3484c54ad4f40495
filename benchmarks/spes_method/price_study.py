# SPDX-License-Identifier: Apache-2.0
"""Study `price`: what SPES costs by the steps between rounds and the owners of an expert, each at its best rate."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import Case
from benchmarks.pictures import two_axes
from benchmarks.spes_method.model import Sizes
from benchmarks.spes_method.outcomes import Outcome, lengths_of, outcome_of, write_outcomes
from benchmarks.spes_method.runs import Methods, Run, Runs

__all__ = ["METHODS", "best_of_rates", "study_price"]

SIZES = Sizes(hidden=32, width=16, context=32)
"""Of the model: there are many runs."""

SHARES = (0.35, 0.5, 0.7, 1.0, 1.4)
"""Lengths of the centralized runs that say what a loss is worth in tokens."""

RATES = (6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
"""Learning rates that every method tries."""

CHOOSING = (1, 2, 3)
"""Seeds that choose between them; no other seed is measured with what it has chosen."""

INTERVALS = (1, 10, 50)
OWNERS = (4, 2, 1)
PEERS = 4

_BASE = Run(
    replicas=PEERS,
    sequences=4,
    rate=0.0,
    steps=600,
    warmup=60,
    seed=0,
    owners=PEERS,
    common_gradients=True,
    validations=1,
    sizes=SIZES,
)


def _methods() -> Methods:
    found = {"centralized": ("centralized", _BASE)}
    for owners in OWNERS[1:]:
        run = dataclasses.replace(_BASE, owners=owners)
        found[f"centralized_{owners}_owners"] = (f"centralized, owners' tokens alone, owners: {owners}", run)
    for owners in OWNERS:
        for interval in INTERVALS:
            run = dataclasses.replace(_BASE, owners=owners, interval=interval, common_gradients=False)
            found[f"h{interval}_{owners}_owners"] = (f"rounds, H = {interval}, owners: {owners}", run)
    return found


METHODS: Methods = _methods()
"""What is compared; runs get a seed, and in `price` a rate."""


def study_price(
    output: Path,
    corpus: Path,
    seeds: Sequence[int],
    picture: Path,
    methods: Methods = METHODS,
    rates: Sequence[float] = RATES,
    choosing: Sequence[int] = CHOOSING,
) -> list[Case]:
    """Make the runs that are missing, print the table, draw the picture.

    Args:
        output: folder of runs and figures.
        corpus: prefix of the tokens.
        seeds: measure every method at its best learning rate.
        picture: the PNG to write.
        methods: what is compared.
        rates: learning rates to try.
        choosing: seeds that choose between several rates, by the mean of their losses.
    """
    runs = Runs(output / "price", corpus)
    if len(rates) > 1:
        runs.make_missing(
            [trial for _, run in methods.values() for rate in rates for trial in _trials(run, rate, choosing)]
        )
    chosen = {name: best_of_rates(runs, run, choosing, rates) for name, (_, run) in methods.items()}
    for seed in seeds:  # so that an interrupted study has pairs
        of_seed = {name: dataclasses.replace(run, seed=seed) for name, run in chosen.items()}
        runs.make_missing([*of_seed.values(), *lengths_of(of_seed["centralized"], SHARES)])
    references = [dataclasses.replace(chosen["centralized"], seed=seed) for seed in seeds]
    found = [
        outcome_of(
            runs,
            name,
            methods[name][0],
            [dataclasses.replace(run, seed=seed) for seed in seeds],
            references,
            SHARES,
        )
        for name, run in chosen.items()
    ]
    write_outcomes(found, output / "price.json")
    _draw({outcome.name: outcome for outcome in found}, picture)
    return [one.case() for one in found if one.name != "centralized"]


def _trials(run: Run, rate: float, seeds: Sequence[int]) -> list[Run]:
    return [dataclasses.replace(run, rate=rate, seed=seed) for seed in seeds]


def best_of_rates(runs: Runs, run: Run, seeds: Sequence[int], rates: Sequence[float]) -> Run:
    """Return a method's run with the rate of the lowest mean loss; one that diverges is the last choice."""

    def loss(rate: float) -> float:
        found = statistics.mean(runs.final(trial) for trial in _trials(run, rate, seeds))
        return math.inf if math.isnan(found) else found

    return dataclasses.replace(run, rate=rates[0] if len(rates) == 1 else min(rates, key=loss))


def _draw(found: Mapping[str, Outcome], picture: Path) -> None:
    with two_axes(picture) as (prices, worths):
        for owners in OWNERS:
            central = "centralized" if owners == PEERS else f"centralized_{owners}_owners"
            names = [central, *(f"h{interval}_{owners}_owners" for interval in INTERVALS)]
            label = f"an expert learns at {owners} of {PEERS} peers"
            for axes, values in (
                (prices, [found[name].percent for name in names]),
                (worths, [found[name].worth for name in names]),
            ):
                middle = [statistics.median(each) for each in values]
                axes.plot(range(len(names)), middle, "o-", label=label)
                axes.fill_between(range(len(names)), [min(v) for v in values], [max(v) for v in values], alpha=0.2)
        for axes in (prices, worths):
            axes.set_xticks(range(1 + len(INTERVALS)), ["every gradient", *(f"H = {h}" for h in INTERVALS)])
            axes.legend()
        prices.set(ylabel="% above centralized", title="Validation loss at the end, median and range")
        worths.set(ylabel="share of the tokens", title="Tokens of centralized training with that loss")
