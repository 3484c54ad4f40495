# SPDX-License-Identifier: Apache-2.0
"""Many simulations: the values of some options, all combinations of them, and their results as CSV and as a picture."""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

__all__ = [
    "Sweep",
    "combinations_of",
    "draw_sweep",
    "picture_problems",
    "read_sweep",
    "with_baseline_once",
    "write_csv",
]

_MOST = 10_000
"""Simulations of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """An option and its values."""

    flag: str
    """With its dashes."""

    values: tuple[str, ...]
    """As they would be written behind it."""


def read_sweep(text: str) -> Sweep:
    """Return a sweep that was written as NAME=V1,V2,... or NAME=FIRST:LAST:COUNT, with equal ratios between the values.

    Raises:
        UserError: it is neither.
    """
    name, equals, written = text.partition("=")
    if not (name and equals and written):
        raise UserError(f"--sweep {text!r}: write NAME=V1,V2,... or NAME=FIRST:LAST:COUNT")
    flag = "--" + name.removeprefix("--")
    if ":" not in written:
        return Sweep(flag=flag, values=tuple(written.split(",")))
    try:
        first, last, count = written.split(":")
        begin, end, number = float(first), float(last), int(count)
    except ValueError:
        raise UserError(f"--sweep {text!r}: a range is FIRST:LAST:COUNT, such as {name}=0.1:100:13") from None
    if not (0 < begin < math.inf and 0 < end < math.inf and 2 <= number <= _MOST):
        raise UserError(
            f"--sweep {text!r}: FIRST and LAST must be above 0, because the ratios between values are equal, and COUNT "
            f"2 to {_MOST}; list values to have others, such as {name}=0,5,10"
        )
    ratio = (end / begin) ** (1 / (number - 1))
    return Sweep(flag=flag, values=tuple(f"{begin * ratio**place:.6g}" for place in range(number)))


def combinations_of(sweeps: Sequence[Sweep]) -> Iterator[tuple[str, ...]]:
    """Yield every combination of values, one of each sweep.

    Raises:
        UserError: there are too many.
    """
    count = math.prod(len(sweep.values) for sweep in sweeps)
    if count > _MOST:
        raise UserError(f"--sweep: {count} simulations; at most {_MOST} are made")
    yield from product(*(sweep.values for sweep in sweeps))


def with_baseline_once(
    rows: Sequence[dict[str, Any]], sweeps: Sequence[Sweep], baseline: str
) -> list[dict[str, Any]]:
    """Return rows in which a baseline has one row for all values of an option that changes others, and not it.

    The option's value is None then. So synchronous training is one line beside those of several codecs.

    Args:
        rows: with the sweeps' flags and `method`; every combination for every method.
        sweeps: one or more.
        baseline: a method, which need not be among them.
    """
    flags = [sweep.flag.removeprefix("--") for sweep in sweeps]
    methods = {row["method"] for row in rows}
    lacks = [
        flag
        for flag in flags
        if [method for method in methods if not _changes(rows, method, flag, flags)] == [baseline]
    ]
    found = [
        {name: None if name in lacks and row["method"] == baseline else value for name, value in row.items()}
        for row in rows
    ]
    return list({tuple(row.values()): row for row in found}.values())


def _changes(rows: Sequence[dict[str, Any]], method: str, flag: str, flags: Sequence[str]) -> bool:
    """Return whether values of an option make a difference to a way to train, the other options being the same."""
    results: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    for row in rows:
        if row["method"] == method:
            others = tuple(row[other] for other in flags if other != flag)
            results.setdefault(others, set()).add(tuple(value for name, value in row.items() if name not in flags))
    return any(len(found) > 1 for found in results.values())


def write_csv(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write results, one line each.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise UserError(f"--csv {file}: cannot be written ({error.strerror}); give another file") from None


def picture_problems(option: str, file: Path) -> list[str]:
    """Return why a picture cannot be drawn, in one sentence; nothing where it can.

    Args:
        option: that names the picture's file.
        file: its path, whose ending says the format.
    """
    from megatron_ext.extras import pip_install

    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return [f"{option} needs matplotlib; install it with: {pip_install('matplotlib')}"]
    formats = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() in formats:
        return []
    return [f"{option} {file}: its ending names no kind of picture; give a name that ends in .png or .svg"]


def draw_sweep(rows: Sequence[dict[str, Any]], sweeps: Sequence[Sweep], file: Path, meaning: str) -> None:
    """Draw utilisation over the first sweep's values, a line for every way to train and value of the others.

    Args:
        rows: with the sweeps' flags, `method` and `utilisation`, as `with_baseline_once` returns them.
        sweeps: one or more.
        file: replaced; without problems.
        meaning: of the first sweep's option, with its unit.

    Raises:
        UserError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    over, *others = (sweep.flag.removeprefix("--") for sweep in sweeps)
    places = dict(zip(sweeps[0].values, _numbers(sweeps[0].values), strict=True))
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        label = ", ".join([row["method"], *(f"{other} {row[other]}" for other in others if row[other] is not None)])
        along = list(places.values()) if row[over] is None else [places[row[over]]]
        lines.setdefault(label, []).extend((place, row["utilisation"]) for place in along)
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
    numbers = [place for place in places.values() if isinstance(place, float)]
    if len(numbers) == len(places) and min(numbers) > 0 and max(numbers) > 10 * min(numbers):
        axes.set_xscale("log")
    axes.set(xlabel=f"{over}\n{textwrap.fill(meaning, 100)}", ylabel="utilisation", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _numbers(values: Iterable[str]) -> list[float | str]:
    """Return values as numbers, or as they are where one is none."""
    written = list(values)
    try:
        return [float(value) for value in written]
    except ValueError:
        return list(written)
