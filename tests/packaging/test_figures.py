# SPDX-License-Identifier: Apache-2.0
"""Every figure that README and docs quote is on docs/figures.md under its command, to the digits quoted."""

from pathlib import Path

import pytest

from benchmarks.figures.commands import BY_NAME, COMMANDS, LACKING
from benchmarks.figures.page import PAGE, README, in_readme, page
from benchmarks.figures.records import FIGURES, read_runs
from tests.packaging.quoted_figures import (
    PAGES,
    Section,
    figures_of,
    is_one_of,
    not_quoted,
    read_mark,
    rows_of,
    sections_of,
)

RUNS = read_runs(FIGURES)
SECTIONS = [section for path in PAGES for section in sections_of(path)]


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_a_figure_is_on_the_page_of_figures(section):
    assert len(section.marks) == 1, (
        f"{section}: say under the heading where {', '.join(section.figures[:5])} are from: <!-- figures: NAMES -->, "
        "names as in `python -m benchmarks.all --list`, or none (benchmarks/README.md, all figures at once)"
    )
    names, given = read_mark(section.marks[0])
    if names == ["none"]:
        assert not given
        return
    assert set(names) <= BY_NAME.keys(), f"{section}: no command is called {set(names) - BY_NAME.keys()}"
    bare = {number.lstrip("+-") for number in given}
    missing = not_quoted(section, rows_of([run for run in RUNS if run.name in names]), bare)
    assert not missing, f"{section}: not on docs/figures.md under {', '.join(names)}: {', '.join(missing)}"
    assert not bare - {figure.lstrip("+-") for figure in section.figures}, f"{section}: listed, but not there"


def test_every_command_has_a_run_of_its_line():
    assert [command.name for command in COMMANDS if command.name not in {run.name for run in RUNS}] == []
    assert [run.name for run in RUNS if run.line != BY_NAME[run.name].line] == []
    assert len(BY_NAME) == len(COMMANDS)


def test_the_pages_are_those_that_the_figures_make():
    assert PAGE.read_text(encoding="utf-8") == page(RUNS), "run python -m benchmarks.all --page"
    text = README.read_text(encoding="utf-8")
    assert text == in_readme(text, RUNS), "run python -m benchmarks.all --page"


def test_a_need_is_one_that_can_be_looked_for():
    assert {need for command in COMMANDS for need in command.needs} == LACKING.keys()


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("took 0.63 s, 12 % of it, 1.04 times, 3 times, 5,092 tokens/s", ["0.63", "12", "1.04", "3", "5,092"]),
        ("| +15.47 % | -0.5 | 1.0e-06 |", ["+15.47", "-0.5", "1.0e-06"]),
        ("three peers, 8 GPUs, H = 50, 64 MiB", []),
        ("Python 3.12, Megatron 0.19, arXiv 2501.18512, 127.0.0.1:50, `--lr 0.7`, [a](b.md#v1.2)", []),
        ("```bash\nmegatron-ext simulate local-sgd --jitter 0.05\n```\n", []),
        ("a\n\n    python -m benchmarks.simulated --step-ms 0.5\n\n    utilisation 0.193\n", ["0.193"]),
    ],
    ids=["units", "table", "integers", "versions", "fenced_command", "indented_command"],
)
def test_what_counts_as_a_figure(text: str, figures: list[str]):
    assert figures_of(text) == figures


@pytest.mark.parametrize(
    ("figure", "number", "same"),
    [
        ("2.00", 1.9951, True),
        ("2.00", 1.9949, False),
        ("15.5", 15.47, True),
        ("4.03", -4.031, True),
        ("+4.03", -4.031, False),
        ("1.0e-06", 1.04e-6, True),
        ("1.0e-06", 1.06e-6, False),
        ("5,092", 5092.4, True),
    ],
)
def test_digits_that_are_quoted_count(figure: str, number: float, same: bool):
    assert is_one_of(figure, [number]) is same


@pytest.mark.parametrize(
    ("label", "row", "missing"),
    [
        pytest.param("", ("0.63", "0.81"), [], id="one"),
        pytest.param("", ("0.63", "0.81", "20"), [], id="given"),
        pytest.param("", ("0.629", "0.763"), [], id="two"),
        pytest.param("", ("0.63", "0.76"), ["0.63", "0.76"], id="two_digits"),
        pytest.param("github_7b", ("0.63", "0.76"), [], id="its_label"),
        pytest.param("github_7b", ("0.629", "0.764"), ["0.764"], id="its_label_wrong_digit"),
        pytest.param("github_13b", ("0.63", "0.76"), ["0.63", "0.76"], id="another_label"),
        pytest.param("github_13b", ("0.629", "0.763"), ["0.629", "0.763"], id="three_digits_of_another_label"),
        pytest.param("7", ("0.63", "0.76"), ["0.63", "0.76"], id="label_of_digits"),
        pytest.param("", ("0.629", "0.764"), ["0.764"], id="wrong_digit"),
        pytest.param("", ("0.5", "0.763"), ["0.5"], id="nowhere"),
    ],
)
def test_a_row_is_quoted_from_one_row_or_those_of_its_label_or_to_three_digits_where_it_has_none(
    label: str, row: tuple[str, ...], missing: list[str]
):
    section = Section(page="a.md", heading="", prose=(), rows=((label, row),), marks=())
    rows = [("a_github_7b", [0.629, 0.807]), ("b_github_7b", [0.763, 0.9]), ("github_13b", [0.55])]
    assert not_quoted(section, rows, {"20"}) == missing


def test_a_comment_that_says_something_else_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="'guessed' is not"):
        read_mark("outer_sync; guessed: 1.2")
