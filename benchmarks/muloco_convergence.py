# SPDX-License-Identifier: Apache-2.0
"""Validation losses of MuLoCo and of DiLoCo after the same tokens: Muon or Adam inside, Nesterov SGD outside.

    python -m benchmarks.muloco_convergence [--json FILE]

Trains a small GPT on the source code of Python's standard library with examples/pretrain_gpt.py, four workers of one
process each. On the first seed, and with the first interval, both try a grid of learning rates; everything else is
trained with the best one of each. A run that is finished is not made again. docs/convergence.md tells what it compares.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.command_line import (
    EachOnce,
    add_report_option,
    add_seeds_option,
    at_least,
    benchmark_parser,
    folder_for_output,
    number_above,
    require_memory,
)
from benchmarks.common import Case, report
from benchmarks.convergence.__main__ import prepare_corpus
from benchmarks.convergence.figures import draw_convergence
from benchmarks.convergence.results import Results, compare, write
from benchmarks.convergence.runs import finished_runs, make, make_missing_of
from benchmarks.convergence.settings import WORKERS, Method, Noise, Run, Study
from tests.support.distributed import REPOSITORY
from tests.support.presets import Options

INTERVALS = (16, 64)
"""Steps between two rounds."""

RATES = {"diloco": (2e-3, 4e-3, 8e-3), "muloco": (8e-3, 1.6e-2, 3.2e-2, 6.4e-2)}
"""Learning rates that each optimizer tries."""

ADAM: Options = {"optimizer": "adam"}
MUON: Options = {
    "optimizer": "muon",
    "muon_momentum": 0.95,
    "muon_nesterov": True,
    # Updates as long as Adam's (a root mean square of 0.2), which trains embeddings, biases and norms at the same rate.
    "muon_scale_mode": "spectral",
    "muon_extra_scale_factor": 0.2,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class InnerMethod(Method):
    """One optimizer inside, one interval and one learning rate."""

    inner: str
    """Of `_INNER`."""

    interval: int
    """Steps between two rounds."""

    rate: float
    """The learning rate."""


_INNER = {"diloco": ("DiLoCo, Adam", ADAM), "muloco": ("MuLoCo, Muon", MUON)}


def methods_of(intervals: Sequence[int], rates: Mapping[str, Sequence[float]]) -> tuple[InnerMethod, ...]:
    """Return every method of the study: both optimizers, at each interval, with each of its rates."""
    return tuple(
        InnerMethod(
            name=f"{inner}_h{interval}_lr{rate:g}",
            title=f"{title}, H = {interval}, lr {rate:g}",
            options={
                **options,
                "lr": rate,
                "min_lr": rate / 10,
                "use_local_sgd": True,
                "local_sgd_workers": WORKERS,
                "local_sgd_sync_interval": interval,
                "outer_optimizer": "sgd",  # with Nesterov's momentum
                "outer_optimizer_lr": 0.7,
                "outer_optimizer_momentum": 0.8,
            },
            inner=inner,
            interval=interval,
            rate=rate,
        )
        for interval in intervals
        for inner, (title, options) in _INNER.items()
        for rate in rates[inner]
    )


@dataclass(frozen=True, kw_only=True)
class MulocoStudy(Study):
    """Where everything is, and how long a run is."""

    iterations: int = 256
    evaluation: int = 32
    methods: tuple[InnerMethod, ...] = field(default_factory=lambda: methods_of(INTERVALS, RATES))
    noise: Noise = field(default_factory=lambda: Noise(methods=()))
    """There is none here."""


def sizes(*, layers: int = 2, hidden: int = 64, context: int = 64, sequences: int = 8) -> Options:
    """Return the options of the model and of a step.

    Args:
        layers: of the model.
        hidden: its width, a multiple of its four heads.
        context: tokens of a sequence.
        sequences: of a worker's step.
    """
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "seq_length": context,
        "max_position_embeddings": context,
        "micro_batch_size": sequences,
        "global_batch_size": sequences * WORKERS,
        "lr_warmup_iters": 16,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are missing, and report on all that there are."""
    options = parser().parse_args(arguments)
    _require_sizes(options)
    study = MulocoStudy(
        output=options.output.resolve(),
        iterations=options.iterations,
        evaluation=options.iterations // 8,
        methods=methods_of(options.intervals, {"diloco": options.adam_rates, "muloco": options.muon_rates}),
        overrides=sizes(
            layers=options.layers, hidden=options.hidden, context=options.context, sequences=options.sequences
        ),
    )
    prepare_corpus(study)
    make_missing(study, options.seeds)
    report_on(study, options.seeds, options.json)
    return 0


def _require_sizes(options: argparse.Namespace) -> None:
    """End the program where the options do not go together, or are too large for this machine."""
    # Three quarters are whole intervals, and there are eight evaluations.
    step = math.lcm(8, *(4 * interval for interval in options.intervals))
    if options.iterations % step:
        parser().error(f"--iterations {options.iterations}: give a multiple of {step}, so that intervals end")
    if options.hidden % 8:
        parser().error(f"--hidden {options.hidden}: give a multiple of 8")
    # Of every worker: weights, gradients, two moments, anchor and momentum; and what a step remembers.
    values = 12 * options.layers * options.hidden**2
    remembered = options.sequences * options.context * options.layers * (34 * options.hidden + 20 * options.context)
    named = "--layers, --hidden, --context, --sequences"
    require_memory(parser(), named, WORKERS * 4 * (6 * values + remembered))


def make_missing(study: MulocoStudy, seeds: Sequence[int]) -> None:
    """Try all rates on the first seed with the first interval, then train with the best ones."""
    make_missing_of(study, trials(study, seeds[0]), make)
    make_missing_of(study, [Run(method=method, seed=seed) for seed in seeds for method in best(study, seeds[0])], make)


def trials(study: MulocoStudy, seed: int) -> list[Run]:
    """Return the runs by which rates are chosen."""
    first = study.methods[0].interval
    return [Run(method=method, seed=seed) for method in study.methods if method.interval == first]


def best(study: MulocoStudy, seed: int) -> list[InnerMethod]:
    """Return at every interval the methods with the rates of the lowest losses among the trials on a seed."""
    results = finished_runs(study, trials(study, seed))
    rates: dict[str, float] = {}
    for run, _ in sorted(results.items(), key=lambda item: item[1].final, reverse=True):
        rates |= {method.inner: method.rate for method in study.methods if method is run.method}
    return [method for method in study.methods if rates.get(method.inner) == method.rate]


def report_on(study: MulocoStudy, seeds: Sequence[int], json_file: Path | None) -> list[Case]:
    """Print the table, write results.json, table.md and the picture, from the runs that are finished."""
    tried = finished_runs(study, trials(study, seeds[0]))
    chosen = best(study, seeds[0])
    names = {(method.interval, method.inner): method.name for method in chosen}
    # Each is held against Adam's with the same interval.
    methods = tuple(
        dataclasses.replace(method, reference=names.get((method.interval, "diloco"), method.name)) for method in chosen
    )
    final = dataclasses.replace(study, methods=methods)
    results = finished_runs(final, [Run(method=method, seed=seed) for method in methods for seed in seeds])
    print()
    cases = [
        dataclasses.replace(case, case=f"{case.case.split('_lr')[0]}_loss_ratio")
        for case in compare(final, results, seeds)
    ]
    write(study, {**tried, **results}, study.output / "results.json")
    table = "\n".join([*losses_table(final, results, seeds), "", *rates_table(study, tried, seeds[0])])
    (study.output / "table.md").write_text(table + "\n", encoding="utf-8")
    draw_convergence(final, results, seeds, study.output / "convergence.png")
    report(cases, json_file)
    print(f"results.json, table.md and convergence.png are in {study.output}")
    return cases


def losses_table(study: Study, results: Results, seeds: Sequence[int], against: str = "DiLoCo") -> list[str]:
    """Return the lines of a table with the losses at the end, and each against its reference's of the same seed."""
    lines = [f"| method | seeds | median loss | range | against {against} | range |", "|---|---|---|---|---|---|"]
    for method in study.methods:
        reference = study.reference(method)
        of_seed = {seed: results.get(Run(method=method, seed=seed)) for seed in seeds}
        losses = [measured.final for measured in of_seed.values() if measured is not None]
        if not losses:
            continue
        others = {seed: results.get(Run(method=reference, seed=seed)) for seed in seeds}
        percent = [
            100 * (measured.final / other.final - 1)
            for measured, other in zip(of_seed.values(), others.values(), strict=True)
            if measured is not None and other is not None and method is not reference
        ]
        cells = [method.title, str(len(losses)), f"{statistics.median(losses):.4f}", _range(losses, ".4f")]
        cells += [f"{statistics.median(percent):+.2f} %", _range(percent, "+.2f") + " %"] if percent else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def rates_table(study: MulocoStudy, tried: Results, seed: int) -> list[str]:
    """Return the lines of a table with the losses by which learning rates are chosen."""
    rates = sorted({method.rate for method in study.methods})
    first = study.methods[0].interval
    lines = [f"| H = {first}, seed {seed}, lr | {' | '.join(f'{rate:g}' for rate in rates)} |"]
    lines.append("|---" * (len(rates) + 1) + "|")
    for inner, (title, _) in _INNER.items():
        losses = {
            method.rate: f"{tried[Run(method=method, seed=seed)].final:.4f}"
            for method in study.methods
            if method.inner == inner and Run(method=method, seed=seed) in tried
        }
        lines.append(f"| {title} | {' | '.join(losses.get(rate, '') for rate in rates)} |")
    return lines


def parser() -> argparse.ArgumentParser:
    """Return the parser of the study's options."""
    found = benchmark_parser("muloco_convergence", __doc__)
    add_seeds_option(found, "every method")
    found.add_argument(
        "--intervals",
        type=at_least(1),
        nargs="+",
        action=EachOnce,
        default=list(INTERVALS),
        help="steps between rounds (16 64)",
    )
    for name, inner in (("adam", "diloco"), ("muon", "muloco")):
        usual = " ".join(f"{rate:g}" for rate in RATES[inner])
        found.add_argument(
            f"--{name}-rates",
            type=number_above(0, 1),
            nargs="+",
            action=EachOnce,
            default=list(RATES[inner]),
            help=f"its learning rates ({usual})",
        )
    found.add_argument(
        "--iterations", type=at_least(1), default=256, help="of every run, a quarter of them synchronous (256)"
    )
    found.add_argument("--layers", type=at_least(1), default=2, help="of the model (2)")
    found.add_argument("--hidden", type=at_least(8), default=64, help="size of the model, a multiple of 8 (64)")
    found.add_argument("--context", type=at_least(8), default=64, help="tokens of a sequence (64)")
    found.add_argument("--sequences", type=at_least(1), default=8, help="of a worker's step (8)")
    found.add_argument(
        "--output",
        type=folder_for_output,
        default=REPOSITORY / "outputs" / "muloco",
        help="folder for corpus, runs, results.json, table.md and picture (outputs/muloco); one for each other setting",
    )
    add_report_option(found)
    return found


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} - {max(values):{form}}"


if __name__ == "__main__":
    sys.exit(main())
