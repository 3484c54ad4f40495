# SPDX-License-Identifier: Apache-2.0
"""The figures that pages quote, section by section, and what stands beside them on where they are from.

A figure is a number with a decimal point, or one before `%`, `times` or `tokens/s`, outside of code in backticks, of
commands and of links. Under the heading of its section stands a comment:

    <!-- figures: outer_sync switch; given: 0.7 1.25; derived: 12 -->

with the names of the commands (benchmarks/figures/commands.py) that made them; numbers that are *given*, such as
settings, goals and what others have published; and numbers that are *derived* by arithmetic from these figures.
`<!-- figures: none -->` says that no number of a section was measured or computed by us. A row of a table is quoted
where one row of the page of figures (a case with its runs and goal, or a line that a command printed) has all of its
figures, or those together that have what its first cell says. Where no row of the page has what that says, each needs
three digits or more, so that it is not there by chance.
"""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures.records import Run
from tests.packaging.documented import blocks
from tests.packaging.machines import ROOT

WRITTEN_BY_PROGRAMS = {"figures.md", "support-table.md", "versions.md"}
PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in WRITTEN_BY_PROGRAMS),
]

_DECIMAL = r"[+-]?\d[\d,]*\.\d+(?:e[+-]?\d+)?"
_WITH_UNIT = r"[+-]?\d[\d,]*(?= ?(?:%|times\b|tokens/s))"
_FIGURE = re.compile(rf"(?<![\w.,/-])(?:{_DECIMAL}|{_WITH_UNIT})(?!\.?\d)")
_NUMBER = re.compile(rf"(?<![\w.])(?:{_DECIMAL}|[+-]?\d[\d,]*)")
_MARK = re.compile(r"<!-- figures: ([^>]*?) -->", re.DOTALL)
_NO_FIGURES = [
    r"`[^`\n]*`",
    r"\]\([^)\s]*\)",
    r"(?:Apache|Python|Megatron|torch|megatron-core|cuDNN|Transformer Engine|CUDA|arXiv|gcc|Qwen)\s+\d[\d.]*",
    # Versions and addresses.
    r"\d+\.\d+\.[\d.]+",
]


@dataclass(frozen=True, kw_only=True)
class Section:
    """The text under one heading."""

    page: str
    heading: str
    prose: tuple[str, ...]
    """The figures outside of tables, as they are written."""
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """Of each row of its tables what the first cell says, and the figures."""
    marks: tuple[str, ...]
    """What the comments say."""

    @property
    def figures(self) -> tuple[str, ...]:
        return (*self.prose, *(figure for _, row in self.rows for figure in row))

    def __str__(self) -> str:
        return f"{self.page} {self.heading}"


def sections_of(page: Path) -> list[Section]:
    """Return the sections of a page that have figures, or a comment on them."""
    text = page.read_text(encoding="utf-8")
    found = []
    for heading, part in _parts(text):
        # One in backticks is an example.
        marks = tuple(" ".join(mark.split()) for mark in _MARK.findall(re.sub(r"`[^`\n]*`", "", part)))
        lines = re.findall(r"^\|.*$", part, re.MULTILINE)
        section = Section(
            page=str(page.relative_to(ROOT)),
            heading=heading,
            prose=tuple(figures_of(re.sub(r"^\|.*$", "", part, flags=re.MULTILINE))),
            rows=tuple((line.split("|")[1].strip("` "), tuple(row)) for line in lines if (row := figures_of(line))),
            marks=marks,
        )
        if section.figures or marks:
            found.append(section)
    return found


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield every heading with what stands under it; lines of code that begin with # are no headings."""
    heading, taken, code = "", [], False
    for line in text.splitlines():
        code ^= line.lstrip().startswith("```")
        if not code and re.match(r"#+ ", line):
            yield heading, "\n".join(taken) + "\n"
            heading, taken = line, []
        else:
            taken.append(line)
    yield heading, "\n".join(taken) + "\n"


def figures_of(text: str) -> list[str]:
    """Return the figures of a text."""
    for block in blocks(f"\n\n{text}"):
        text = text.replace(block, "\n")
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for pattern in _NO_FIGURES:
        text = re.sub(pattern, "``", text)
    return _FIGURE.findall(text)


def read_mark(mark: str) -> tuple[list[str], list[str]]:
    """Return the names of commands, and the numbers that are given or derived."""
    names, *others = mark.split(";")
    numbers = []
    for other in others:
        kind, _, listed = other.strip().partition(": ")
        if kind not in ("given", "derived"):
            raise ValueError(f"{mark!r}: 'given: ...' or 'derived: ...' is known, {kind!r} is not")
        numbers += listed.split()
    return names.split(), numbers


def rows_of(runs: Sequence[Run]) -> list[tuple[str, list[float]]]:
    """Return name and numbers of every row that the page has of these runs: of a case, or of a printed line."""
    by_case: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for case in run.cases:
            numbers = [float(case[key]) for key in ("value", "goal") if case[key] is not None]
            by_case.setdefault((run.name, case["case"]), []).extend(numbers)
    lines = [line for run in runs for line in run.printed.splitlines()]
    return [
        *((case, numbers) for (_, case), numbers in by_case.items()),
        *((line, [float(number.replace(",", "")) for number in _NUMBER.findall(line)]) for line in lines),
    ]


def not_quoted(section: Section, rows: Sequence[tuple[str, list[float]]], exempt: Container[str]) -> list[str]:
    """Return the figures of a section that are not on the page.

    Args:
        section: of a page.
        rows: name and numbers of those of the page, of the commands that the section names.
        exempt: numbers that are given or derived, without signs.
    """
    everything = [number for _, numbers in rows for number in numbers]
    prose = [figure for figure in section.prose if figure.lstrip("+-") not in exempt]
    found = [figure for figure in prose if not is_one_of(figure, everything)]
    for label, row in section.rows:
        figures = [figure for figure in row if figure.lstrip("+-") not in exempt]
        labelled = [number for name, numbers in rows if names_rows(label) and label in name for number in numbers]
        candidates = [labelled, *(numbers for _, numbers in rows)]
        if any(all(is_one_of(figure, numbers) for figure in figures) for numbers in candidates):
            continue
        if labelled:
            # On a page of hundreds of cases nearly every number of three digits stands under some other label.
            found += [figure for figure in figures if not is_one_of(figure, labelled)]
        else:
            found += [figure for figure in figures if digits_of(figure) < 3 or not is_one_of(figure, everything)]
    return found


def names_rows(label: str) -> bool:
    """Return whether rows can be looked up by a first cell: a number alone stands in any row."""
    return len(label) >= 3 and any(letter.isalpha() for letter in label)


def digits_of(figure: str) -> int:
    """Return how many digits a figure has, without zeros at its beginning."""
    return len(re.sub(r"\D", "", figure.partition("e")[0]).lstrip("0"))


def is_one_of(figure: str, numbers: Sequence[float]) -> bool:
    """Return whether a figure is one of the numbers to the digits that it has; one without a sign also with minus."""
    mantissa, _, exponent = figure.replace(",", "").partition("e")
    digits = len(mantissa.partition(".")[2]) - int(exponent or 0)
    half = 0.5 * 10.0**-digits * (1 + 1e-9)
    value = float(figure.replace(",", ""))
    signed = figure[0] in "+-"
    return any(abs((number if signed else abs(number)) - value) <= half for number in numbers)
