# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: cases, the report for people and as JSON, and statistics of paired runs."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "GUARDS",
    "Case",
    "bootstrap_interval",
    "machine_and_versions",
    "print_table",
    "reaches",
    "report",
]

_ROOT = Path(__file__).resolve().parents[1]

DISTRIBUTIONS = ("torch", "megatron-core", "numpy")

GUARDS: dict[str, Any] = {"skip_anomaly": True, "pseudo_gradnorm_reduce": True, "clip_pseudo_grad": 10.0}
"""What is switched on with the penalty: fields of `LocalSGDConfig`, and of atorch's."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured figure."""

    case: str
    """Name, stable over releases."""

    value: float
    """Median of the paired runs."""

    unit: str
    """What `value` counts; 'ratio' for a quotient."""

    goal: float | None
    """What the project aims at; None where it has set no goal."""

    direction: Literal["lower", "higher"]
    """Which side of the goal is better."""

    @property
    def met(self) -> str:
        """Whether the goal is reached: yes, no, or a dash where there is none.

        The value decides. A bound of its interval would not do: the wider the noise of a machine makes the interval,
        the sooner its better end reaches any goal.
        """
        if self.goal is None:
            return "-"
        return "yes" if reaches(self.value, self.goal, self.direction) else "no"

    def as_dict(self) -> dict[str, str | float | None]:
        """Return what the JSON object holds of this case."""
        return {
            "case": self.case,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "direction": self.direction,
        }


def reaches(value: float, goal: float, direction: str) -> bool:
    """Return whether a value is at its goal or on the better side of it: "lower" or "higher"."""
    return value <= goal if direction == "lower" else value >= goal


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the median of `values`.

    Args:
        values: one per pair, at least one.
        confidence: probability mass of the interval.
        resamples: number of samples drawn with replacement.
        seed: of the random numbers; the same values give the same interval.
    """
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(resamples))
    cut = round((1 - confidence) / 2 * (resamples - 1))
    return medians[cut], medians[-1 - cut]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


def report(cases: Sequence[Case], path: Path | None) -> None:
    """Print the cases against their goals and, with a path, write the JSON object."""
    found = machine_and_versions()
    machine, versions = found["machine"], found["versions"]
    print()
    print_table(
        ("case", "value", "unit", "goal", "met"),
        [
            (case.case, f"{case.value:.4g}", case.unit, "-" if case.goal is None else f"{case.goal:g}", case.met)
            for case in cases
        ],
    )
    print(
        f"\non {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, load average "
        f"{machine['load_average']}; " + ", ".join(f"{name} {version}" for name, version in versions.items())
    )
    if path is not None:
        content = {**found, "cases": [case.as_dict() for case in cases]}
        path.write_text(json.dumps(content, indent=2) + "\n")


def machine_and_versions() -> dict[str, dict[str, Any]]:
    """Return what a report says of this machine, and of the packages."""
    return {"machine": _machine(), "versions": _versions()}


def _machine() -> dict[str, Any]:
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_size / 2**30, 1),
        # Of the last minute: tells whether somebody else was using the machine.
        "load_average": round(os.getloadavg()[0], 1),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {name: metadata.version(name) for name in DISTRIBUTIONS}
    return {"megatron-ext": _own_version(), "python": platform.python_version(), **found}


def _own_version() -> str:
    """Return this package's version, with the commit of a checkout, and `with changes` where it is not that commit."""
    from megatron_ext import __version__

    commit = _git("rev-parse", "--short", "HEAD")
    if not commit:
        return __version__
    # A run changes docs and tables by itself.
    changes = " with changes" if _git("status", "--porcelain", "--", "*.py") else ""
    return f"{__version__} ({commit}{changes})"


def _git(*words: str) -> str:
    """Return what git says of the checkout; nothing where there is no git, or no checkout."""
    try:
        done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
