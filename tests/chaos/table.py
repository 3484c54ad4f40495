# SPDX-License-Identifier: Apache-2.0
"""The figures of several runs as tables in Markdown, in which docs/chaos.md has them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.chaos.report import kind_of

__all__ = ["HEAD", "last_rows", "row"]

HEAD = (
    "| seed | settings | rounds | faults | violations | goodput (intervals lost) | in time "
    "| median s to recover | worst s | final loss against a run without faults |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def row(found: dict[str, Any]) -> str:
    """Return the row of a run."""
    return _row_of(found["settings"]["seed"], kind_of(found["settings"]), [found])


def last_rows(runs: Sequence[dict[str, Any]]) -> str:
    """Return the row of all runs together, and the times to recover from each kind of fault in them."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for found in runs:
        for kind, entry in found["recovery_seconds"].items():
            by_kind[kind] += entry["all"]
    lines = [
        _row_of("all", "", runs),
        "",
        "| fault | times | median s to recover | worst s |",
        "|---|---|---|---|",
        *(_cells(kind, len(seconds), *_recovery(seconds)) for kind, seconds in sorted(by_kind.items())),
    ]
    return "\n".join(lines)


def _row_of(seed: object, kind: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return the row of runs together."""
    return _cells(
        seed,
        kind,
        sum(found["rounds"] for found in runs),
        sum(found["faults"] for found in runs),
        _count_of_violations(runs),
        _goodput(runs),
        _span([found["goodput_in_time"] for found in runs], "{:.1%}"),
        *_recovery(_seconds(runs)),
        _span([_excess(found) for found in runs], "{:+.2%}"),
    )


def _cells(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _seconds(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [seconds for found in runs for entry in found["recovery_seconds"].values() for seconds in entry["all"]]


def _recovery(seconds: Sequence[float]) -> tuple[str, str]:
    """Return the median and the worst of the times to recover."""
    return (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("-", "-")


def _count_of_violations(runs: Sequence[dict[str, Any]]) -> str:
    return str(sum(len(said) for found in runs for said in found["violations"].values()) or "none")


def _goodput(runs: Sequence[dict[str, Any]]) -> str:
    lost, begun = (sum(found[key] for found in runs) for key in ("intervals_lost", "intervals"))
    return f"{_percent('{:.2%}', 1 - lost / begun)} ({lost} of {begun})" if begun else "-"


def _excess(found: dict[str, Any]) -> float:
    return found["loss"] / found["faultless_loss"] - 1


def _span(values: Sequence[float | None], form: str) -> str:
    """Return the least and the greatest of what is known, once where they read alike."""
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    least, greatest = _percent(form, min(known)), _percent(form, max(known))
    return least if least == greatest else f"{least.removesuffix(' %')} to {greatest}"


def _percent(form: str, share: float) -> str:
    # With the space that the documentation has.
    return form.format(share).replace("%", " %")
