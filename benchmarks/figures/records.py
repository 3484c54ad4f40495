# SPDX-License-Identifier: Apache-2.0
"""What commands said: runs with their machine, versions and date, and the file of all that are quoted."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.figures.commands import BY_NAME

__all__ = [
    "FIGURES",
    "DamagedError",
    "Run",
    "as_run",
    "merged",
    "read_json",
    "read_run",
    "read_runs",
    "write_run",
    "write_runs",
]

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures.json"
"""Every run whose figures may be quoted."""

MACHINE = ("cpu", "cores", "memory_gib")
"""By which two machines are told apart."""

_CASE: dict[str, Any] = {
    **{"case": str, "value": (int, float), "unit": str},
    **{"goal": (int, float, type(None)), "direction": str},
}


class DamagedError(Exception):
    """A file or a report that cannot be used; the message says which, and the way out."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one command."""

    name: str
    """Of the command."""

    line: str
    """That was run."""

    date: str
    """As YYYY-MM-DD: when it ran, or when its figures were written down."""

    taken_from: str | None
    """Where the figures were written down by hand; None where `python -m benchmarks.all` made the run."""

    machine: Mapping[str, Any]
    """cpu, cores, memory_gib and load_average, as far as they are known."""

    versions: Mapping[str, str]
    """Of python and packages, as far as they are known."""

    cases: Sequence[Mapping[str, Any]]
    """Of its report: case, value, unit, goal, direction."""

    printed: str
    """What it printed besides, without the report's own table."""

    @property
    def place(self) -> tuple[Any, ...]:
        """A newer run takes the place of an older one with the same."""
        return (self.name, *(self.machine.get(key) for key in MACHINE))


def as_run(content: Any, where: str) -> Run:
    """Return the run that a JSON value is.

    Raises:
        DamagedError: it is none.
    """
    names = {field.name for field in fields(Run)}
    if not isinstance(content, dict) or set(content) != names:
        raise DamagedError(f"{where}: a run has exactly the fields {', '.join(sorted(names))}")
    for key, kind in (("machine", dict), ("versions", dict), ("cases", list), ("printed", str), ("line", str)):
        if not isinstance(content[key], kind):
            raise DamagedError(f"{where}: '{key}' is not a {kind.__name__}")
    if content["name"] not in BY_NAME:
        raise DamagedError(f"{where}: no command of benchmarks/figures/commands.py is called {content['name']!r}")
    for case in content["cases"]:
        _check_case(case, where)
    twice = [name for name, count in Counter(case["case"] for case in content["cases"]).items() if count > 1]
    if twice:
        raise DamagedError(f"{where}: two cases are called {', '.join(twice)}")
    return Run(**content)


def _check_case(case: Any, where: str) -> None:
    if not isinstance(case, dict) or set(case) != set(_CASE):
        raise DamagedError(f"{where}: a case has exactly the fields {', '.join(_CASE)}, not {case!r:.200}")
    for key, kind in _CASE.items():
        if not isinstance(case[key], kind):
            raise DamagedError(f"{where}: '{key}' of the case {case['case']!r} is {case[key]!r}")
    value, direction = case["value"], case["direction"]
    if isinstance(value, bool) or not math.isfinite(value) or direction not in ("lower", "higher"):
        raise DamagedError(f"{where}: the case {case['case']!r} is {value}, and {direction!r} is better")


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedError(f"{path} is not JSON: {error}; delete it, or restore it from the repository") from None


def read_run(path: Path) -> Run:
    """Return the run that a file holds."""
    return as_run(read_json(path), str(path))


def write_run(run: Run, path: Path) -> None:
    """Write a run to a file, which is whole or not there."""
    _write(asdict(run), path)


def read_runs(path: Path) -> list[Run]:
    """Return all runs of the file of figures, in its order.

    Raises:
        DamagedError: the file cannot be used.
    """
    content = read_json(path)
    if not isinstance(content, dict) or set(content) != {"runs"} or not isinstance(content["runs"], list):
        raise DamagedError(f"{path}: it is one object with the list 'runs'")
    runs = [as_run(run, f"{path}, run {number}") for number, run in enumerate(content["runs"], 1)]
    twice = [place[0] for place, count in Counter(run.place for run in runs).items() if count > 1]
    if twice:
        raise DamagedError(f"{path}: two runs of one machine for {', '.join(twice)}; keep the newer one")
    return runs


def write_runs(runs: Iterable[Run], path: Path) -> None:
    """Write the file of figures."""
    _write({"runs": [asdict(run) for run in runs]}, path)


def merged(runs: Iterable[Run], new: Iterable[Run]) -> list[Run]:
    """Return runs with new ones, in the order of the commands: one of each command and machine.

    That is the newest; a run of a line that the command no longer has gives way to any of its line.
    """
    by_place = {run.place: run for run in runs}
    for run in new:
        known = by_place.get(run.place)
        if known is None or known.date <= run.date or known.line != BY_NAME[known.name].line:
            by_place[run.place] = run
    order = list(BY_NAME)
    return sorted(by_place.values(), key=lambda run: (order.index(run.name), run.date))


def _write(content: Any, path: Path) -> None:
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
