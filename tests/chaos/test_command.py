# SPDX-License-Identifier: Apache-2.0
"""The command: what it refuses before a run, which runs it makes, and the tables of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures.commands import BY_NAME
from benchmarks.figures.records import FIGURES, read_runs
from tests.chaos.__main__ import main
from tests.chaos.histories import history
from tests.chaos.report import figures
from tests.chaos.schedule import Fault
from tests.chaos.settings import Settings
from tests.chaos.table import HEAD, last_rows, row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "chaos.md"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--seed", "1", "--minutes", "0"], "--minutes is 0.0; it must be above 0"),
        (["--seed", "1", "--minutes", "-3"], "--minutes is -3.0; it must be above 0"),
        (["--seed", "1", "--faults-per-hour", "nan"], "--faults-per-hour is nan; it must be above 0"),
        (["--seed", "1", "--schedule", "nowhere"], "--schedule nowhere: No such file"),
        (["--seed", "1", "--dir", "/proc"], "--dir /proc: is not empty"),
        (["--seed", "1", "--dir", "/proc/x"], "--dir /proc/x: No such file or directory; give a new folder"),
        (["--seeds", "1", "2", "--dir", __file__], f"--dir {__file__}: File exists; give a new folder"),
        (["--seed", "-1"], "--seed is -1; give 0 to 2^63 - 1"),
        (["--seeds", "1", str(1 << 63)], f"--seed is {1 << 63}; give 0 to 2^63 - 1"),
        (["--seed", "1", "--shrink", "-2"], "--shrink is -2; give 0 to 1000"),
        (["--seed", "1", "--shards", "3"], "--shards is 3; give 1 to 2: the model has as many tensors"),
        (["--seed", "1", "--jobs", "--shards", "2"], "--shards 2 is for synthetic peers; drop it, or --jobs"),
        (["--seed", "1", "--jobs", "--guards"], "--guards is for synthetic peers; drop it, or --jobs"),
        (["--seed", "1", "--faults-per-hour", "1e9"], "--faults-per-hour is 1e+09; give 36000"),
        (["--seed", "1", "--minutes", "1e300"], "--minutes is 1e+300; give 10080 (a week) or less"),
    ],
    ids=[
        *("no minutes", "minutes below 0", "faults", "schedule", "full dir", "no dir", "file", "below 0", "seed"),
        *("shrink", "shards", "shards of jobs", "guards of jobs", "too many faults", "too long"),
    ],
)
@pytest.mark.usefixtures("made")
def test_the_command_line_is_refused_before_anything_is_started(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
):
    assert main(argv) == 2
    _is_one_line(capsys, problem)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "one of the arguments --seed --seeds is required"),
        (["--seed", "1", "--seeds", "2"], "argument --seeds: not allowed with argument --seed"),
        (["--seed", "1", "--seed", "2"], "argument --seed: is given more than once; give several seeds as --seeds 7 9"),
        (["--seeds", "1", "--seeds", "2"], "argument --seeds: is given more than once"),
        (["--seeds", "100-109", "7", "104"], "argument --seeds: 104 is given more than once; give each once"),
        (["--seeds", "109-100"], "argument --seeds: 109-100 goes from high to low; give 100-109"),
        (["--seeds", "0-1000"], "argument --seeds: 0-1000 has 1001 seeds; give 1000 or fewer"),
        (["--seeds", "3-"], "argument --seeds: '3-' is neither a seed nor a range of them; give 7 or 100-109"),
        (["--seeds"], "argument --seeds: expected at least one argument"),
        (["--seed", "1", "--tabel"], "unrecognized arguments: --tabel; did you mean --table?"),
        (["--seed", "1", "--json", "/no/such/x.json"], "--json: /no/such/x.json cannot be written: No such file"),
    ],
    ids=[
        *("no seed", "both", "seed twice", "seeds twice", "in a range too", "high to low", "too many", "torn", "none"),
        *("unknown option", "json"),
    ],
)
@pytest.mark.usefixtures("made")
def test_words_that_cannot_be_read_are_refused(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    _is_one_line(capsys, problem)


def _is_one_line(capsys: pytest.CaptureFixture[str], problem: str) -> None:
    said = capsys.readouterr()
    assert problem in said.err and said.err.count("\n") == 1 and not said.out


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, dict[str, Any]]:
    """Return the runs to come by seed, which the command then finds in place of making them."""
    runs: dict[int, dict[str, Any]] = {}

    def make(settings: Settings, faults: Sequence[Fault], seconds: float, folder: Path, zygote: object) -> dict:
        folder.mkdir()
        return runs[settings.seed]

    monkeypatch.setattr("tests.chaos.__main__._made", make)
    monkeypatch.setattr("tests.chaos.__main__.Zygote", Zygote)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return runs


class Zygote:
    """In place of the process that all others are forked from."""

    def close(self) -> None:
        """Do nothing."""


def a_run(seed: int, **changed: Any) -> dict[str, Any]:
    """Return figures of the history made by hand, with changes."""
    found = figures(history())
    found["settings"]["seed"] = seed
    return found | {"loss": 0.5, "faultless_loss": 0.5} | changed


VIOLATED = {"processes stay": ["p0 ended by itself"]}


@pytest.mark.parametrize("violated", [False, True], ids=["well", "violated"])
def test_a_run_without_a_folder_leaves_files_only_where_a_rule_was_violated(
    violated: bool, made: dict[int, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made[1] = a_run(1, violations=VIOLATED if violated else {})
    assert main(["--seed", "1", "--minutes", "0.1"]) == int(violated)
    left = list(tmp_path.iterdir())
    assert len(left) == int(violated)
    assert not violated or f"files: {left[0]}" in capsys.readouterr().out


def test_each_seed_of_several_has_its_run_and_one_violation_is_enough_for_the_status(
    made: dict[int, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made.update({seed: a_run(seed, violations=VIOLATED if seed == 8 else {}) for seed in (7, 8, 11)})
    argv = ["--minutes", "0.1", "--dir", str(tmp_path / "runs"), "--json", str(tmp_path / "figures.json")]
    assert main(["--seeds", "7-8", "11", *argv]) == 1
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines() if ": 3 peers" in line] == ["seed 7", "seed 8", "seed 11"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"seed-7", "seed-8", "seed-11"}
    assert f"files: {tmp_path}/runs/seed-8\nagain: python -m tests.chaos --seed 8 --minutes 0.1 " in said
    assert [found["settings"]["seed"] for found in json.loads((tmp_path / "figures.json").read_text())] == [7, 8, 11]


def test_a_table_has_a_row_for_each_seed_and_nothing_else_on_stdout(
    made: dict[int, dict[str, Any]], capsys: pytest.CaptureFixture[str]
):
    runs = [a_run(7), a_run(8, violations=VIOLATED)]
    made.update({found["settings"]["seed"]: found for found in runs})
    assert main(["--seeds", "7", "8", "--minutes", "0.1", "--table"]) == 1
    said = capsys.readouterr()
    head = "Minutes a seed: 0.1; faults: 600 an hour."
    assert said.out == f"{head}\n\n{HEAD}\n{row(runs[0])}\n{row(runs[1])}\n{last_rows(runs)}\n"
    assert said.err.startswith("VIOLATION of 'processes stay': p0 ended by itself\nseed 8; ")


def test_rows_say_what_a_run_lost_and_the_last_ones_what_all_did():
    quick = {"peer killed": {"all": [1.0, 3.0]}, "full disk": {"all": [8.0]}}
    runs = [a_run(3), a_run(4, faults=3, intervals=28, recovery_seconds=quick, loss=0.505, goodput_in_time=None)]
    cells = "1 | none | 91.67 % (1 of 12) | 91.7 % | 1.30 | 1.30 | +0.00 %"
    assert row(runs[0]) == f"| 3 | quorum 2 of 3, fp32, mean | 4 | {cells} |"
    assert row(runs[1]).endswith("| 3 | none | 96.43 % (1 of 28) | unknown | 3.00 | 8.00 | +1.00 % |")
    runs[1] |= {"goodput_in_time": 0.5, "violations": VIOLATED}
    assert last_rows(runs).splitlines() == [
        # The median is that of 1, 1.3, 3 and 8 seconds.
        "| all |  | 8 | 4 | 1 | 95.00 % (2 of 40) | 50.0 to 91.7 % | 2.15 | 8.00 | +0.00 to +1.00 % |",
        "",
        "| fault | times | median s to recover | worst s |",
        "|---|---|---|---|",
        "| full disk | 1 | 8.00 | 8.00 |",
        "| peer killed | 3 | 1.30 | 3.00 |",
    ]


def test_a_run_without_faults_and_without_an_interval_has_a_row():
    calm = a_run(1, faults=0, intervals=0, intervals_lost=0, recovery_seconds={}, goodput_in_time=None)
    assert row(calm).endswith("| 0 | none | - | unknown | - | - | +0.00 % |")


@pytest.mark.parametrize("name", ["chaos_seeds", "chaos_shards", "chaos_guards", "chaos_jobs"])
def test_the_tables_of_the_page_are_what_the_command_that_it_names_has_printed(name: str):
    text = PAGE.read_text(encoding="utf-8")
    assert f"`{BY_NAME[name].line}`" in text
    printed = [run.printed for run in read_runs(FIGURES) if run.name == name]
    assert any(table in text for table in printed), f"put what {name} has printed into docs/chaos.md"
