# SPDX-License-Identifier: Apache-2.0
"""The bandwidth that training needs to reach a compute utilisation, as simulated here and in the papers of DiLoCo:
table 4 of Streaming DiLoCo (arXiv 2501.18512), and the simulated utilisation of DiLoCo's scaling laws (arXiv
2503.09799). Both columns are computed, none is measured.

    python -m benchmarks.diloco_bandwidth [--json FILE]

The papers' figures are those of a grid of 50 bandwidths from 0.1 to 1000 Gbit/s in equal ratios, 1.21 from one to the
next, and so are ours; the difference is told in steps of that grid. Utilisations are of intervals amid a run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import EachOnce, add_report_option, benchmark_parser
from benchmarks.common import Case, print_table, report
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.simulate.fleet import SimulatedFleet
from megatron_ext.simulate.job_setup import JobSetup
from megatron_ext.simulate.model_units import equal_layers
from megatron_ext.simulate.training_work import SimulatedTraining

GRID = [10 ** (-1 + 4 * place / 49) for place in range(50)]
"""Gbit/s."""

REACHED = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The papers' columns."""

BACKWARD = 2 / 3
"""Part of a step in which synchronous training's gradients travel."""

LAYERS_OF_A_FRAGMENT = 3
"""In Streaming DiLoCo's table."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of a table."""

    name: str
    """As the paper calls it."""

    parameters: float
    """That are synchronised."""

    layers: int
    """Fragments are made of them; 1 where none are made."""

    step_seconds: float
    """The paper's own estimate, compute alone."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: a way to train, and what the paper's simulator found."""

    model: Model
    """What is trained."""

    method: str
    """As the paper calls it."""

    published: tuple[float, ...]
    """Gbit/s by `REACHED`; infinite where the paper has '1000.0+'."""

    interval: int = 100
    """H; 0 for synchronous training."""

    streaming: bool = False
    """Whether there are fragments."""

    delay: int = 0
    """tau."""

    codec: str = "bf16"
    """Ours: that of their 16-bit gradients, or of their E3M0."""


_1B = Model(name="1B", parameters=1e9, layers=24, step_seconds=0.1)
_10B = Model(name="10B", parameters=1e10, layers=48, step_seconds=0.8)
_100B = Model(name="100B", parameters=1e11, layers=108, step_seconds=4.9)
_CHINCHILLA = Model(name="Chinchilla 10B", parameters=1e10, layers=1, step_seconds=0.8)
_LLAMA = Model(name="Llama3 405B", parameters=4.05e11, layers=1, step_seconds=26.0)
_DEEPSEEK = Model(name="DeepSeek-V3 671B", parameters=6.71e11, layers=1, step_seconds=20.0)


def _streaming_table(
    model: Model,
    synchronous: tuple[float, ...],
    vanilla: tuple[float, ...],
    streaming: tuple[float, ...],
    overlapped: tuple[float, ...],
    four_bit: tuple[float, ...],
) -> list[Row]:
    return [
        Row(model=model, method="Data-Parallel", published=synchronous, interval=0),
        Row(model=model, method="DiLoCo", published=vanilla),
        Row(model=model, method="Streaming", published=streaming, streaming=True),
        Row(model=model, method="Streaming, overlapped, tau 1", published=overlapped, streaming=True, delay=1),
        Row(model=model, method="Streaming, overlapped, tau 2", published=overlapped, streaming=True, delay=2),
        *(
            Row(
                model=model,
                method=f"Streaming, overlapped FP4, tau {delay}",
                published=four_bit,
                streaming=True,
                delay=delay,
                codec="int4",
            )
            for delay in (1, 2)
        ),
    ]


STREAMING = [
    *_streaming_table(
        _1B,
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    *_streaming_table(
        _10B,
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    *_streaming_table(
        _100B,
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
]
"""Table 4 of arXiv 2501.18512: H = 100, three layers a fragment."""

_BY_INTERVAL: dict[Model, dict[int, tuple[float, ...]]] = {
    _CHINCHILLA: {
        0: (104.8, 184.2, 222.3, 222.3, 390.7),
        1: (104.8, 184.2, 222.3, 222.3, 390.7),
        10: (16.0, 49.4, 86.8, 152.6, 222.3),
        50: (3.0, 11.0, 23.3, 41.0, 126.5),
        100: (1.4, 6.2, 13.3, 23.3, 86.8),
        300: (0.5, 2.0, 4.3, 9.1, 41.0),
    },
    _LLAMA: {
        0: (126.5, 222.3, 268.3, 323.8, 323.8),
        1: (126.5, 222.3, 268.3, 323.8, 323.8),
        10: (19.3, 72.0, 126.5, 184.2, 268.3),
        50: (3.6, 13.3, 28.1, 59.6, 184.2),
        100: (2.0, 7.5, 16.0, 33.9, 126.5),
        300: (0.7, 3.0, 6.2, 13.3, 59.6),
    },
    _DEEPSEEK: {
        0: (323.8, 569.0, 686.6, 686.6, math.inf),
        1: (323.8, 569.0, 686.6, 686.6, math.inf),
        10: (49.4, 152.6, 268.3, 390.7, 686.6),
        50: (7.5, 33.9, 72.0, 126.5, 390.7),
        100: (4.3, 16.0, 41.0, 72.0, 268.3),
        300: (1.7, 6.2, 13.3, 28.1, 126.5),
    },
}

SCALING_LAWS = [
    Row(
        model=model,
        method=f"DiLoCo, H = {interval}" if interval else "Data-Parallel",
        published=published,
        interval=interval,
    )
    for model, found in _BY_INTERVAL.items()
    for interval, published in found.items()
]
"""Simulated compute utilisation of arXiv 2503.09799."""


def setup_of(row: Row, gbits: float, steps: int) -> JobSetup:
    """Return the run of a row over a link between two workers."""
    return JobSetup(
        fleet=SimulatedFleet(workers=2, bandwidth=gbits, latency=0.0, overlap=0.0 if row.interval else BACKWARD),
        training=SimulatedTraining(steps=steps, step_seconds=row.model.step_seconds),
        units=equal_layers(int(row.model.parameters), row.model.layers),
        local_sgd=LocalSGDConfig(
            use_local_sgd=True, local_sgd_workers=2, local_sgd_sync_interval=row.interval or 1, codec=row.codec
        ),
        streaming=StreamingConfig(
            fragments=row.model.layers // LAYERS_OF_A_FRAGMENT if row.streaming else 1, sync_delay=row.delay
        ),
    )


def utilisation(row: Row, gbits: float) -> float:
    """Return the utilisation of intervals in the middle of a run."""
    interval = row.interval or 1
    shorter, longer = (setup_of(row, gbits, count * interval) for count in (3, 6))
    longer.check()
    if not row.interval:
        return longer.baseline().utilisation
    before, after = shorter.run(), longer.run()
    return (after.time["training"] - before.time["training"]) / (after.seconds - before.seconds)


def least(reaches: Callable[[float], bool]) -> int:
    """Return the place in the grid of the least bandwidth that is enough, `len(GRID)` where none is."""
    low, high = 0, len(GRID)
    while low < high:
        middle = (low + high) // 2
        if reaches(GRID[middle]):
            high = middle
        else:
            low = middle + 1
    return low


def place_of(gbits: float) -> int:
    """Return the place in the grid of a figure of a paper, which has one digit behind the point."""
    return min(range(len(GRID)), key=lambda place: abs(GRID[place] - gbits)) if gbits < math.inf else len(GRID)


def compare_row(row: Row) -> list[tuple[float, int]]:
    """Return for every utilisation the bandwidth that we find, and by how many steps of the grid it is above theirs."""
    found = []
    known: dict[float, float] = {}

    def at(gbits: float) -> float:
        if gbits not in known:
            known[gbits] = utilisation(row, gbits)
        return known[gbits]

    for level, published in zip(REACHED, row.published, strict=True):

        def reaches(gbits: float, level: float = level) -> bool:
            return at(gbits) >= level - 1e-9

        place = least(reaches)
        found.append((GRID[place] if place < len(GRID) else math.inf, place - place_of(published)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate both tables and report."""
    options = parser().parse_args(arguments)
    tables = {"streaming": STREAMING, "scaling-laws": SCALING_LAWS}
    there = {row.model.name for name in options.tables for row in tables[name]}
    if missing := [name for name in options.models or () if name not in there]:
        parser().error(f"--models: {', '.join(missing)} is in none of --tables {' '.join(options.tables)}")
    cases = []
    for name in options.tables:
        rows = []
        for row in tables[name]:
            if options.models and row.model.name not in options.models:
                continue
            found = compare_row(row)
            cells = [
                f"{_written(theirs)} / {_written(ours)} ({steps:+d})"
                for theirs, (ours, steps) in zip(row.published, found, strict=True)
            ]
            rows.append([row.model.name, row.method, *cells])
            key = f"{row.model.name} {row.method}".lower().replace(",", "").replace(" = ", "").replace(" ", "_")
            worst = max((steps for _, steps in found), key=abs)
            cases.append(Case(case=key, value=worst, unit="steps of 1.21 in bandwidth", goal=None, direction="lower"))
        print(f"{name}: Gbit/s to reach a utilisation, published / simulated here (steps of the grid between them)\n")
        print_table(["model", "method", *(f"{level:.0%}" for level in REACHED)], rows)
        print()
    report(cases, options.json)
    return 0


def _written(gbits: float) -> str:
    return "1000+" if gbits == math.inf else f"{gbits:.1f}"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = benchmark_parser("diloco_bandwidth", __doc__)
    names = ("streaming", "scaling-laws")
    result.add_argument("--tables", nargs="+", action=EachOnce, choices=names, default=list(names), help="which (both)")
    models = [row.model.name for row in (*STREAMING, *SCALING_LAWS)]
    result.add_argument(
        "--models", nargs="+", action=EachOnce, choices=list(dict.fromkeys(models)), help="which of them (all)"
    )
    add_report_option(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
