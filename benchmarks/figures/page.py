# SPDX-License-Identifier: Apache-2.0
"""The page of all figures, and the tables of benchmarks/README.md, from the file of figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import reaches
from benchmarks.figures.commands import BY_NAME, Command
from benchmarks.figures.records import DamagedError, Run

__all__ = ["PAGE", "README", "in_readme", "page", "write_pages"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "figures.md"
README = ROOT / "benchmarks" / "README.md"

_BLOCK = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- end of the table -->)", re.DOTALL)

_HEAD = """# Figures

Every figure that README and these pages quote, with the command that makes it, the machine and the versions.
`python -m benchmarks.all` makes them again, or some of them, and writes this page from `docs/figures.json`
([how](../benchmarks/README.md#all-figures-at-once)). Where a command ran on several machines, each has a column, and
what is quoted is the range. **Run** are those that `benchmarks.all` has made; **written down** are those of before,
which were taken over from where they stood. Load averages tell how much else the machine had to do. Whether a goal is
**met** is decided by the value, not by a bound of its interval, which noise moves towards the goal; "2 of 3" counts
runs.
"""


def write_pages(runs: Sequence[Run], page_file: Path, readme: Path) -> None:
    """Write the page and the tables of benchmarks/README.md.

    Raises:
        DamagedError: the latter asks for a table of something that is not there.
    """
    text = in_readme(readme.read_text(encoding="utf-8"), runs)
    page_file.write_text(page(runs), encoding="utf-8")
    readme.write_text(text, encoding="utf-8")


def page(runs: Sequence[Run]) -> str:
    """Return the page of all figures."""
    parts = [_HEAD]
    for command in BY_NAME.values():
        own = [run for run in runs if run.name == command.name]
        if own:
            parts.append(_section(command, own))
    return "\n".join(parts)


def in_readme(text: str, runs: Sequence[Run]) -> str:
    """Return the text of benchmarks/README.md with its tables filled in."""

    def filled(found: re.Match[str]) -> str:
        rows = ["| command | case | value | runs | goal | met |", "|---|---|---|---|---|---|"]
        for name in found[2].split():
            own = [run for run in runs if run.name == name]
            if not own:
                raise DamagedError(f"{README}: it asks for a table of {name!r}, of which docs/figures.json has no run")
            first = f"[{name}](../docs/figures.md#{name})"
            for case, of_runs in _by_case(own).items():
                values = [one["value"] for one in of_runs if one is not None]
                rows.append(_row([first, f"`{case}`", _range(values), str(len(values)), *_goal(of_runs)]))
                first = ""
        return found[1] + "\n".join(rows) + "\n" + found[3]

    return _BLOCK.sub(filled, text)


def number(value: float) -> str:
    """Return a value as it is shown: with four digits, and from 1000 on as a whole number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _section(command: Command, runs: Sequence[Run]) -> str:
    lines = [f"## {command.name}", "", "```bash", command.line.replace(" && ", " &&\n"), "```", ""]
    lines += [f"{place}. {_said_about(run)}" for place, run in enumerate(runs, 1)]
    by_case = _by_case(runs)
    if by_case:
        columns = [str(place) for place in range(1, len(runs) + 1)]
        lines += ["", f"| case | unit | {' | '.join(columns)} | range | goal | met |", "|---" * (len(runs) + 5) + "|"]
        for case, of_runs in by_case.items():
            values = [one["value"] for one in of_runs if one is not None]
            cells = ["" if one is None else number(one["value"]) for one in of_runs]
            unit = next(one["unit"] for one in of_runs if one is not None)
            lines.append(_row([f"`{case}`", unit, *cells, _range(values) if len(values) > 1 else "", *_goal(of_runs)]))
    for place, run in enumerate(runs, 1):
        if run.printed:
            head = "What it printed" if run.taken_from is None else "What was written down besides"
            of = f", {place}" if len(runs) > 1 else ""
            lines += ["", f"{head}{of}:", "", "```text", run.printed.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _said_about(run: Run) -> str:
    how = "**Run**" if run.taken_from is None else f"**Written down** in {run.taken_from}"
    machine = run.machine
    parts = [str(machine.get("cpu", "an unknown machine"))]
    parts += [f"{machine['cores']} cores"] if "cores" in machine else []
    parts += [f"{machine['memory_gib']} GiB"] if "memory_gib" in machine else []
    parts += [f"load average {machine['load_average']}"] if "load_average" in machine else []
    versions = [f"{name} {version}" for name, version in run.versions.items()]
    return f"{how}, {run.date}: {', '.join(parts)}" + (f"; {', '.join(versions)}" if versions else "")


def _by_case(runs: Sequence[Run]) -> dict[str, list[Mapping[str, Any] | None]]:
    """Return, by name, the case of every run, None where a run has not got it."""
    names = dict.fromkeys(case["case"] for run in runs for case in run.cases)
    return {
        name: [next((case for case in run.cases if case["case"] == name), None) for run in runs] for name in names
    }


def _range(values: Sequence[float]) -> str:
    """Return one value, or the least and the largest of several."""
    shown = list(dict.fromkeys(number(value) for value in sorted(values)))
    return shown[0] if len(shown) == 1 else f"{shown[0]} - {shown[-1]}"


def _row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _goal(of_runs: Sequence[Mapping[str, Any] | None]) -> tuple[str, str]:
    """Return the cells of the goal, and of the runs that reached it."""
    found = [case for case in of_runs if case is not None]
    goal = found[-1]["goal"]
    if goal is None:
        return "", ""
    direction = found[-1]["direction"]
    met = sum(reaches(case["value"], goal, direction) for case in found)
    said = "yes" if met == len(found) else "no" if met == 0 else f"{met} of {len(found)}"
    return f"{'at most' if direction == 'lower' else 'at least'} {number(goal)}", said
