# SPDX-License-Identifier: Apache-2.0
"""What all simulations have in common at the command line: a run as a table or JSON, a sweep as CSV and picture."""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ext.errors import UserError, combine
from megatron_ext.output_files import output_problems
from megatron_ext.phrases import listed, meant_option

if TYPE_CHECKING:
    from megatron_ext.simulate.sweep import Sweep

__all__ = ["ShownRun", "add_output_options", "show"]


class ShownRun(Protocol):
    """What became of a run, for people and for machines."""

    @property
    def seconds(self) -> float:
        """Of the run."""

    @property
    def time(self) -> Mapping[Any, float]:
        """The same by cause."""

    def figures(self) -> dict[str, str]:
        """Return the figures for people, by name."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures under their names."""


_BASELINE = "synchronous"
"""The way to train that has none of the options of the others."""

Simulate = Callable[[argparse.Namespace], tuple[str, Mapping[str, ShownRun]]]
"""Returns what was simulated, in a line, and the runs by the name of the way to train."""


def add_output_options(
    parser: argparse.ArgumentParser, simulate: Simulate, needed: Sequence[Sequence[str]]
) -> None:
    """Add the options, and make the parser's function.

    Args:
        parser: with the simulation's options.
        simulate: one.
        needed: flags of which a simulation needs one each.
    """
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the results as JSON")
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="simulate with every value of an option: NAME=V1,V2,... or NAME=FIRST:LAST:COUNT with equal ratios; given "
        "again, every combination",
    )
    group.add_argument("--csv", type=Path, metavar="FILE", help="write a sweep's results; replaces the file")
    group.add_argument("--png", type=Path, metavar="FILE", help="its picture (needs matplotlib); replaces the file")
    for flags in needed:
        for flag in flags:
            action = parser._option_string_actions[flag]
            action.default = None
            told = (action.help or "").partition(" (default: 0")[0]
            action.help = f"{told} (needed)" if len(flags) == 1 else told
    parser.set_defaults(func=lambda options: show(parser, options, simulate, needed))


def show(
    parser: argparse.ArgumentParser, options: argparse.Namespace, simulate: Simulate, needed: Sequence[Sequence[str]]
) -> int:
    """Simulate and print.

    Raises:
        UserError: a setting cannot be.
    """
    _check_needed(parser, options, needed)
    if options.sweep:
        return _sweep(parser, options, simulate)
    for flag, file in (("--csv", options.csv), ("--png", options.png)):
        if file is not None:
            raise UserError(f"{flag} has no effect without --sweep; give one or drop it")
    said, runs = simulate(options)
    if options.json:
        print(json.dumps({name: run.as_json() for name, run in runs.items()}, indent=2))
    else:
        print(said)
        print(_table(runs))
    return 0


def _check_needed(
    parser: argparse.ArgumentParser, options: argparse.Namespace, needed: Sequence[Sequence[str]]
) -> None:
    """Say all that is missing in one line.

    Raises:
        UserError: something is.
    """
    swept = {"--" + text.partition("=")[0].removeprefix("--") for text in options.sweep}
    missing = [
        " or ".join(flags)
        for flags in needed
        if swept.isdisjoint(flags)
        and all(getattr(options, parser._option_string_actions[flag].dest) is None for flag in flags)
    ]
    if len(missing) == 1:
        raise UserError(f"simulate: {missing[0]} is missing; give it")
    if missing:
        raise UserError(f"simulate: these options are missing: {', '.join(missing)}")


def _sweep(parser: argparse.ArgumentParser, options: argparse.Namespace, simulate: Simulate) -> int:
    from megatron_ext.simulate.sweep import combinations_of, draw_sweep, read_sweep, with_baseline_once, write_csv

    sweeps = [read_sweep(text) for text in options.sweep]
    for name, times in Counter(sweep.flag.removeprefix("--") for sweep in sweeps).items():
        if times > 1:
            raise UserError(f"--sweep {name} is given {times} times; give all its values in one: {name}=V1,V2,...")
    parsed = [_read_values(parser, sweep) for sweep in sweeps]
    _check_files(options.csv, options.png)
    rows: list[dict[str, Any]] = []
    for values in combinations_of(sweeps):
        chosen = copy.copy(options)
        for (place, read), value in zip(parsed, values, strict=True):
            setattr(chosen, place, read[value])
        swept = {sweep.flag.removeprefix("--"): value for sweep, value in zip(sweeps, values, strict=True)}
        try:
            _, runs = simulate(chosen)
        except UserError as error:
            which = ", ".join(f"{name}={value}" for name, value in swept.items())
            raise UserError(f"{error} (--sweep {which})") from None
        for method, run in runs.items():
            found = run.as_json()
            causes = {f"seconds_{cause}": seconds for cause, seconds in found.pop("seconds_by_cause").items()}
            # The option of a server is called as the result is: 'rounds'.
            found = {f"{name}_of_run" if name in swept else name: value for name, value in found.items()}
            rows.append({**swept, "method": method, **found, **causes})
    rows = with_baseline_once(rows, sweeps, _BASELINE)
    if options.csv is not None:
        write_csv(rows, options.csv)
    if options.png is not None:
        meaning = (parser._option_string_actions[sweeps[0].flag].help or "").replace("%%", "%")
        draw_sweep(rows, sweeps, options.png, re.split(r" \((?:default|needed)|\. ", meaning)[0])
    swept_names = [sweep.flag.removeprefix("--") for sweep in sweeps]
    if options.json:
        numbers = {
            (name, text): value
            for name, (_, read) in zip(swept_names, parsed, strict=True)
            for text, value in read.items()
            if isinstance(value, int | float)
        }
        told = [{name: numbers.get((name, value), value) for name, value in row.items()} for row in rows]
        print(json.dumps(told, indent=2))
        return 0
    names = [*swept_names, "method", "utilisation", "tokens_per_second", "seconds"]
    shown = [names, *([_number(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for cells in shown:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    return 0


def _check_files(table: Path | None, picture: Path | None) -> None:
    """Look at where results go, which is better known before all simulations than after them.

    Raises:
        UserError: they cannot go there.
    """
    from megatron_ext.simulate.sweep import picture_problems

    problems = [] if table is None else output_problems("--csv", table)
    if picture is not None:
        problems += output_problems("--png", picture) or picture_problems("--png", picture)
        if table is not None and table.resolve() == picture.resolve():
            problems = [f"--csv and --png are both {picture}; name two files"]
    if problems:
        raise combine(problems, "simulate")


def _can_be_swept(action: argparse.Action) -> bool:
    """Return whether an option is a setting of a simulation with one value."""
    is_setting = action.dest not in ("sweep", "csv", "png") and action.help != argparse.SUPPRESS
    return is_setting and action.nargs is None


def _read_values(parser: argparse.ArgumentParser, sweep: Sweep) -> tuple[str, dict[str, Any]]:
    """Return where the values of a sweep go, and what they are, as if they stood on the command line.

    Raises:
        UserError: there is no such option with a value, it cannot have one of these, or has one twice.
    """
    name = sweep.flag.removeprefix("--")
    allowed = {flag: action for flag, action in parser._option_string_actions.items() if _can_be_swept(action)}
    action = allowed.get(sweep.flag)
    known = parser._option_string_actions.get(sweep.flag)
    if known is not None and known.nargs == 0 and known.dest not in ("help", "json"):
        raise UserError(f"--sweep {name}: {sweep.flag} has no values to sweep; simulate with it and without it")
    if action is None:
        meant = meant_option(sweep.flag, allowed)
        raise UserError(
            f"--sweep {name}: {sweep.flag} is not a setting with one value; "
            + (meant or f"--help lists them: {listed(list(allowed), more='other')}")
        )
    found = {}
    for value in sweep.values:
        if value in found:
            raise UserError(f"--sweep {name}: {value} is given more than once; give each value once")
        try:
            found[value] = parser._get_value(action, value)
            parser._check_value(action, found[value])
        except argparse.ArgumentError as error:
            raise UserError(f"--sweep {name}={value}: {error.message}") from None
    return action.dest, found


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"


def _table(runs: Mapping[str, ShownRun]) -> str:
    """Return runs as text, one column each."""
    every = list(runs.values())
    figures = [run.figures() for run in every]
    rows = [["", *runs], *([name, *(found[name] for found in figures)] for name in figures[0])]
    rows.append(["time by cause, %", *("" for _ in every)])
    for cause in every[0].time:
        if any(run.time[cause] for run in every):
            rows.append([f"  {cause}", *(f"{100 * run.time[cause] / run.seconds:.2f}" for run in every)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for head, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([head.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)
