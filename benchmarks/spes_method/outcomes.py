# SPDX-License-Identifier: Apache-2.0
"""From finished runs to losses against a reference, in percent and in tokens."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Case, print_table
from benchmarks.spes_method.runs import Run, Runs, equivalent

__all__ = ["Outcome", "lengths_of", "outcome_of", "write_outcomes"]

HEAD = ("method", "lr", "median loss", "range", "against centralized", "range", "tokens worth")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one method reached, over paired seeds."""

    name: str
    """In cases."""
    title: str
    rate: float
    losses: list[float]
    """At the end, by seed."""
    percent: list[float]
    """Above the reference's loss."""
    worth: list[float]
    """Share of the reference's tokens with which it would have this loss."""
    shares: tuple[float, ...]
    """Between whose ends that is known."""

    def row(self) -> tuple[str, ...]:
        """Return its row of the table with the head `HEAD`."""
        worth = statistics.median(self.worth)
        # Of an even number of seeds either of the two in the middle may be one that the curve does not reach.
        middle = statistics.median_low(self.worth), statistics.median_high(self.worth)
        ends = {min(self.shares): "at most ", max(self.shares): "at least "}
        beyond = [word for end, word in ends.items() if any(abs(each - end) < 1e-9 for each in middle)]
        return (
            self.title,
            f"{self.rate:g}",
            f"{statistics.median(self.losses):.4f}",
            f"{min(self.losses):.4f} - {max(self.losses):.4f}",
            f"{statistics.median(self.percent):+.2f} %",
            f"{min(self.percent):+.2f} - {max(self.percent):+.2f} %",
            f"{''.join(beyond)}{worth:.2f}",
        )

    def case(self, goal: float | None = None) -> Case:
        """Return the quotient of its loss and the reference's, with a goal."""
        ratio = 1 + statistics.median(self.percent) / 100
        return Case(case=f"{self.name}_loss_ratio", value=ratio, unit="ratio", goal=goal, direction="lower")


def write_outcomes(found: Sequence[Outcome], file: Path) -> None:
    """Print the table, and write it as Markdown, and everything that is known as JSON.

    Args:
        found: a row each.
        file: of the JSON; that of the table ends with .md.
    """
    rows = [outcome.row() for outcome in found]
    print_table(HEAD, rows)
    lines = ["| " + " | ".join(row) + " |" for row in [HEAD, ("---",) * len(HEAD), *rows]]
    file.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    file.write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")


def lengths_of(reference: Run, shares: Sequence[float]) -> list[Run]:
    """Return reference runs of shares of a length, each with a whole schedule."""
    return [
        dataclasses.replace(
            reference, steps=round(reference.steps * share), warmup=round(reference.warmup * share)
        )
        for share in shares
    ]


def outcome_of(
    runs: Runs,
    name: str,
    title: str,
    of_seeds: Sequence[Run],
    references: Sequence[Run],
    shares: tuple[float, ...],
) -> Outcome:
    """Return what a method reached.

    Args:
        runs: where they are.
        name: of the method in cases.
        title: for people.
        of_seeds: its runs.
        references: the reference's runs of the same seeds.
        shares: lengths of the reference runs, of that of the others, 1 among them.

    Raises:
        RuntimeError: a run is missing.
    """
    losses, percent, worth = [], [], []
    for run, reference in zip(of_seeds, references, strict=True):
        loss, other = runs.final(run), runs.final(reference)
        curve = [(length.steps / reference.steps, runs.final(length)) for length in lengths_of(reference, shares)]
        losses.append(loss)
        percent.append(100 * (loss / other - 1))
        worth.append(equivalent(loss, curve))
    return Outcome(
        name=name,
        title=title,
        rate=of_seeds[0].rate,
        losses=losses,
        percent=percent,
        worth=worth,
        shares=shares,
    )
