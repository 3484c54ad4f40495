# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.all`: which commands run, what is kept of them, and what is refused."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import all as benchmarks_all
from benchmarks.common import Case
from benchmarks.figures.commands import BY_NAME, COMMANDS, LACKING, Command
from benchmarks.figures.page import page
from benchmarks.figures.records import DamagedError, Run, as_run, merged, read_runs

MEASURED = "python -m benchmarks.messages --messages 2 --turns 1"


@pytest.fixture
def no_commands() -> Iterator[None]:
    """Take all commands away, and give them back in their order, which is that of the page."""
    with mock.patch.dict(BY_NAME, clear=True):
        yield


@pytest.fixture
def folder(no_commands: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of results, with commands, figures and pages of its own beside it."""
    monkeypatch.setitem(LACKING, "wings", lambda: True)
    for command in (
        Command(name="measured", line=MEASURED, minutes=0.1),
        Command(name="printed", line=f"echo utilisation 0.193 of {benchmarks_all.ROOT}/docs", minutes=0.1),
        Command(name="failing", line="echo one && echo two >&2 && exit 3", minutes=0.1),
        Command(name="flying", line="echo 1", minutes=1, needs=("wings",)),
        Command(name="long", line="echo 1", minutes=100),
    ):
        monkeypatch.setitem(BY_NAME, command.name, command)
    for constant, name, text in (
        ("FIGURES", "figures.json", '{"runs": []}'),
        ("PAGE", "figures.md", ""),
        ("README", "README.md", "text\n"),
    ):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(benchmarks_all, constant, tmp_path / name)
    return tmp_path / "results"


def call(folder: Path, *words: str) -> int:
    return benchmarks_all.main([*words, "--folder", str(folder)])


def made_up(**changes) -> Run:
    case = {"case": "some_ratio", "value": 1.5, "unit": "ratio", "goal": 1.25, "direction": "lower"}
    content = {
        "name": "printed",
        "line": "echo",
        "date": "2026-01-01",
        "taken_from": None,
        "machine": {"cpu": "this", "cores": 2, "memory_gib": 8},
        "versions": {"torch": "2"},
        "cases": [case],
        "printed": "",
    }
    return as_run({**content, **changes}, "here")


@pytest.mark.slow
def test_a_report_is_kept_with_machine_and_versions_and_taken_from_there_the_next_time(folder: Path, capsys):
    assert call(folder, "--only", "measured") == 0
    (run,) = read_runs(benchmarks_all.FIGURES)
    assert (run.line, run.taken_from) == (MEASURED, None)
    assert {case["case"] for case in run.cases} == {"messages_wire", "messages_protobuf", "messages_speedup"}
    assert run.machine["cores"] >= 1
    assert "torch" in run.versions
    # What the report repeats as a table is not printed twice on the page.
    assert "messages/s" in run.printed
    assert "messages_wire" not in run.printed
    assert "| `messages_speedup` | ratio |" in benchmarks_all.PAGE.read_text()

    result = folder / "measured.json"
    result.write_text(result.read_text().replace(run.date, "2020-02-02"))
    benchmarks_all.FIGURES.write_text('{"runs": []}')
    capsys.readouterr()
    assert call(folder, "--only", "measured") == 0
    assert "[1/1] measured: of 2020-02-02" in capsys.readouterr().out
    assert [found.date for found in read_runs(benchmarks_all.FIGURES)] == ["2020-02-02"]


def test_an_old_result_in_the_folder_does_not_replace_a_newer_run(folder: Path, capsys):
    assert call(folder, "--only", "printed") == 0
    (run,) = read_runs(benchmarks_all.FIGURES)
    result = folder / "printed.json"
    result.write_text(result.read_text().replace(run.date, "2020-02-02"))
    assert call(folder, "--only", "printed") == 0
    assert "printed: docs/figures.json keeps a newer run of this machine" in capsys.readouterr().out
    assert read_runs(benchmarks_all.FIGURES) == [run]


@pytest.mark.parametrize(
    "words",
    [["--only", "printed", "--quick"], ["--list", "--only", "printed"], ["--page", "--quick"], ["--page", "--again"]],
    ids=" ".join,
)
def test_options_without_effect_are_refused(folder: Path, capsys, words: list[str]):
    with pytest.raises(SystemExit) as end:
        call(folder, *words)
    assert end.value.code == 2
    assert "not allowed with" in (said := capsys.readouterr().err) or "has no effect" in said
    assert not folder.exists()


def test_a_result_of_another_line_is_made_again_and_so_is_any_with_again(folder: Path, monkeypatch):
    assert call(folder, "--only", "printed") == 0
    (run,) = read_runs(benchmarks_all.FIGURES)
    assert run.printed == "utilisation 0.193 of docs"
    monkeypatch.setitem(BY_NAME, "printed", dataclasses.replace(BY_NAME["printed"], line="echo 0.2"))
    assert call(folder, "--only", "printed") == 0
    assert [found.printed for found in read_runs(benchmarks_all.FIGURES)] == ["0.2"]
    result = folder / "printed.json"
    result.write_text(result.read_text().replace('"printed": "0.2"', '"printed": "0.3"'))
    assert call(folder, "--only", "printed") == 0
    assert [found.printed for found in read_runs(benchmarks_all.FIGURES)] == ["0.3"]
    assert call(folder, "--only", "printed", "--again") == 0
    assert [found.printed for found in read_runs(benchmarks_all.FIGURES)] == ["0.2"]


def test_a_command_that_fails_is_shown_and_the_others_are_kept(folder: Path, capsys):
    assert call(folder, "--only", "failing", "printed") == 1
    said = capsys.readouterr()
    assert "benchmarks.all: error: failing: ended with status 3, its last lines:\n    one\n    two\n" in said.err
    assert "1 of 2 commands are in docs/figures.json" in said.out
    assert [run.name for run in read_runs(benchmarks_all.FIGURES)] == ["printed"]


def test_what_a_machine_lacks_is_left_out_and_is_a_failure_if_it_was_asked_for(folder: Path, capsys, monkeypatch):
    for name in ("measured", "failing"):
        monkeypatch.delitem(BY_NAME, name)
    assert call(folder, "--quick") == 0
    assert "flying: left out, it needs wings" in capsys.readouterr().out
    assert [run.name for run in read_runs(benchmarks_all.FIGURES)] == ["printed"]
    assert call(folder, "--only", "flying") == 1


def test_a_job_that_would_resume_from_an_earlier_run_begins_afresh(folder: Path, monkeypatch):
    checkpoints = folder.parent / "checkpoints"
    (checkpoints / "iter_8").mkdir(parents=True)
    line = f"mkdir {checkpoints} && echo trained 0.5"
    command = Command(name="printed", line=line, minutes=0.1, resumes=str(checkpoints))
    monkeypatch.setitem(BY_NAME, "printed", command)
    assert call(folder, "--only", "printed", "--again") == 0
    assert list(checkpoints.iterdir()) == []


def test_folders_of_jobs_that_would_resume_are_among_the_outputs():
    folders = [command.resumes for command in COMMANDS if command.resumes]
    assert folders and all(folder.startswith("outputs/") and ".." not in folder for folder in folders)


def test_the_list_shows_every_command_and_runs_none(folder: Path, capsys):
    assert call(folder, "--list") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:]] == list(BY_NAME)
    assert ["flying", "1", "wings", "-", "echo", "1"] in lines
    assert all(" ".join(line[4:]).endswith(BY_NAME[line[0]].line) for line in lines[1:])
    assert not folder.exists()


def test_an_unknown_name_is_refused(folder: Path, capsys):
    with pytest.raises(SystemExit) as end:
        call(folder, "--only", "outer_snyc")
    assert end.value.code == 2
    assert "invalid choice: 'outer_snyc'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"runs": [', "[]", '{"runs": [{}]}'], ids=["cut", "list", "empty_run"])
def test_damaged_figures_end_it_before_anything_runs(folder: Path, capsys, text: str):
    benchmarks_all.FIGURES.write_text(text)
    assert call(folder, "--only", "printed") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"benchmarks.all: error: {benchmarks_all.FIGURES}")
    assert benchmarks_all.FIGURES.read_text() == text
    assert not folder.exists()


def test_a_damaged_result_is_told_and_the_others_are_kept(folder: Path, capsys):
    folder.mkdir()
    (folder / "measured.json").write_text("{")
    assert call(folder, "--only", "measured", "printed") == 1
    assert "measured.json is not JSON" in capsys.readouterr().err
    assert [run.name for run in read_runs(benchmarks_all.FIGURES)] == ["printed"]


def test_a_readme_that_asks_for_a_table_without_a_run_is_told_before_anything_runs(folder: Path, capsys):
    benchmarks_all.README.write_text("<!-- table: measured -->\n<!-- end of the table -->\n")
    assert call(folder, "--only", "printed") == 2
    assert "it asks for a table of 'measured'" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cases": [{"case": "some_ratio"}]}, "a case has exactly the fields"),
        ({"name": "nobody"}, "is called 'nobody'"),
        ({"printed": 3}, "'printed' is not a str"),
        ({"colour": "red"}, "a run has exactly the fields"),
    ],
    ids=["case", "name", "type", "field"],
)
def test_a_run_that_is_none_is_refused(folder: Path, changes: dict, said: str):
    with pytest.raises(DamagedError, match=f"^here: .*{said}"):
        made_up(**changes)


def test_cases_of_one_name_and_values_that_are_no_number_are_refused(folder: Path):
    (case,) = made_up().cases
    with pytest.raises(DamagedError, match="two cases are called some_ratio"):
        made_up(cases=[case, case])
    for value in (float("nan"), float("inf"), "1", True):
        with pytest.raises(DamagedError, match="some_ratio"):
            made_up(cases=[{**case, "value": value}])


@pytest.mark.parametrize("direction", ["lower", "higher"])
@pytest.mark.parametrize("value", [1.2, 1.25, 1.3])
def test_the_page_judges_a_value_as_the_benchmark_that_reported_it_did(folder: Path, value: float, direction: str):
    case = Case(case="some_ratio", value=value, unit="ratio", goal=1.25, direction=direction)
    (row,) = [line for line in page([made_up(cases=[case.as_dict()])]).splitlines() if "some_ratio" in line]
    assert row.split("|")[-2].strip() == case.met


def test_a_newer_run_replaces_that_of_its_machine_and_the_page_has_the_range_over_machines(folder: Path):
    old = made_up()
    (case,) = old.cases
    new = made_up(date="2026-02-02", machine={**old.machine, "load_average": 3}, cases=[{**case, "value": 1.6}])
    other = made_up(machine={"cpu": "another"}, cases=[{**case, "value": 1.2}])
    old, new, other = (dataclasses.replace(run, line=BY_NAME["printed"].line) for run in (old, new, other))
    assert merged([other, new], [old]) == [other, new]
    assert merged([dataclasses.replace(new, line="another")], [old]) == [old]
    runs = merged([old, other], [new])
    assert runs == [other, new]
    text = page(runs)
    assert "| `some_ratio` | ratio | 1.2 | 1.6 | 1.2 - 1.6 | at most 1.25 | 1 of 2 |" in text


def test_of_a_training_log_the_losses_are_kept_and_not_every_iteration():
    log = (
        " [2026-11-30 20:42:11.351114] iteration        9/      80 | consumed samples:          144 |\n"
        "[2026-11-30 20:42:16.331789] saving checkpoint at iteration      16 to outputs in torch_dist format\n"
        "-------------------------------------------------\n"
        " validation loss at iteration 16 | lm loss value: 3.902132E+00 |\n"
        "> megatron_ext: local SGD: evaluating the synced weights\n"
    )
    assert [line.split()[0] for line in benchmarks_all.without_report(log).splitlines()] == ["validation", ">"]
