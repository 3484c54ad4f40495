# SPDX-License-Identifier: Apache-2.0
"""The command lines of all benchmarks: what cannot be measured is refused in one line, before anything is."""

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.command_line import EachOnce, at_least, folder_for_output, picture, require_memory, writable
from tests.support.distributed import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
COMMANDS = sorted(
    str(path.relative_to(BENCHMARKS).with_suffix("")).replace("/", ".")
    for path in BENCHMARKS.rglob("*.py")
    if "def parser(" in path.read_text(encoding="utf-8")
)


def command(name: str) -> ModuleType:
    """Return the module of a command, by the name that comes behind `python -m benchmarks.`."""
    return importlib.import_module(f"benchmarks.{name}" if name in COMMANDS else f"benchmarks.{name}.__main__")


def refusal(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last line of what a command says before it ends with status 2."""
    with pytest.raises(SystemExit) as end:
        command(name).main(words)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    line = said.err.splitlines()[-1]
    assert line.startswith(f"python -m benchmarks.{name}: error: ")
    return line


def test_every_command_is_found():
    assert len(COMMANDS) > 20 and "messages" in COMMANDS and "spes_method.__main__" in COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_has_bounds_and_no_list_has_one_twice(name: str):
    parser = command(name).parser()
    assert parser.prog == f"python -m benchmarks.{name.removesuffix('.__main__')}"
    for action in parser._actions:
        if action.option_strings and action.nargs != 0:
            assert action.choices or action.type not in (None, int, float, Path), action.option_strings
        if action.nargs in ("+", "*"):
            assert isinstance(action, EachOnce), action.option_strings


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("all", "--folder {file}", "argument --folder: {file}: {file} cannot be used: Not a directory; give a folder"),
        ("all", "--folder /proc/figures", "argument --folder: /proc/figures: /proc cannot be used"),
        ("all", "--only nonsense", "argument --only: invalid choice: 'nonsense'; --list shows all"),
        ("all", "--only outer_snyc", "invalid choice: 'outer_snyc'; did you mean outer_sync? --list shows all"),
        ("all", "--only switch switch", "argument --only: switch is given more than once"),
        ("spes_round", "--dir {file}", "argument --dir: {file}: {file} cannot be used: Not a directory; give a folder"),
        ("spes_round", "--dir {folder}/missing", "missing cannot be used: No such file or directory; give a folder"),
        ("spes_round", "--dir /proc", "argument --dir: /proc: /proc cannot be used"),
        ("spes_round", "--millions nan", "argument --millions: nan cannot be; use a number above 0, 1e+09 or less"),
        ("spes_round", "--bytes-millions 0", "argument --bytes-millions: 0 cannot be"),
        ("spes_round", "--link inf", "argument --link: inf cannot be"),
        ("spes_round", "--peers 2 100", "argument --peers: 100 is too large; use 64 or less"),
        ("spes_round", "--peers 2 3", "--peers 3: 16 experts cannot be shared out evenly; give --experts"),
        ("spes_round", "--millions 1e9", "--millions, --layers, --hidden, --experts, --peers: with these"),
        ("spes_round", "--merge-width 1000000 --hidden 2000", "--merge-width, --hidden: with these all processes"),
        ("server_load", "--dir {file}", "argument --dir: {file}"),
        ("server_load", "--peers 5000", "argument --peers: 5000 is too large; use 4096 or less"),
        ("server_load", "--values 1000000000000", "--values, --peers: with these all processes hold about"),
        ("server_load", "--values 4", "--tensors is 8, of 4 values; give 4 or less"),
        ("server_load", "--servers 9", "--servers is 9; give as many tensors for them to share (--tensors)"),
        ("simulated", "--step-ms nan", "argument --step-ms: nan cannot be"),
        ("simulated", "--step-ms -1", "argument --step-ms: -1 cannot be"),
        ("simulated", "--nice 40", "argument --nice: 40 is too large; use 19 or less"),
        ("simulated", "--png {folder}/table.txt", "table.txt: give a file whose name ends with .png"),
        ("simulated", "--png {file}/table.png", "table.png cannot be written: Not a directory; give a file"),
        ("simulated", "--shrink 2000", "--shrink 2000 leaves too small a model at 100 Mbit/s; give 1000 or less"),
        ("simulated", "--mbits 100000 --workers 64", "--mbits, --workers: with these all processes hold about"),
        ("diloco_bandwidth", "--tables streaming --models 1B --json {folder}", "cannot be written: Is a directory"),
        ("diloco_bandwidth", "--tables scaling-laws --models 1B", "--models: 1B is in none of --tables scaling-laws"),
        ("hot_switch_estimate", "--spreads 2.5", "argument --spreads: 2.5 cannot be; use 0 to 2"),
        ("hot_switch_estimate", "--spreads 1.2 nan", "argument --spreads: nan cannot be; use 0 to 2"),
        ("hot_switch_estimate", "--memory-gib nan", "argument --memory-gib: nan cannot be"),
        ("hot_switch_estimate", "--steps 999999999", "argument --steps: 999999999 is too large"),
        ("messages", "--messages 1000000", "--messages: with these all processes hold about"),
        ("straggler", "--step-ms nan", "argument --step-ms: nan cannot be"),
        ("straggler", "--step-ms 1e-9", "argument --step-ms: 1e-9 cannot be; use a number above 0.1, 1e+06 or less"),
        ("straggler", "--seconds inf", "argument --seconds: inf cannot be"),
        ("straggler", "--seconds 0.01", "--seconds 0.01: a step of the slow worker takes 0.08 s; train for longer"),
        ("straggler", "--numel 1000000000000", "--numel: with these all processes hold about"),
        ("straggler", "--slow-by 2 2", "argument --slow-by: 2 is given more than once"),
        ("straggler_in_megatron", "--step-seconds 0", "argument --step-seconds: 0 cannot be"),
        ("switch", "--layers 3", "--layers, --hidden, --vocab: "),
        ("switch", "--hidden 100000", "--layers, --hidden, --vocab: with these all processes hold about"),
        ("switch", "--layers 1002", "argument --layers: 1002 is too large; use 1000 or less"),
        ("switch_plan", "--model llama-13b --ranks 32", "--model llama-13b, --ranks 32: "),
        ("switch_sizes", "--chunk-bytes 1500000", "--chunk-bytes: '1500000': give a multiple of 1048576"),
        ("switch_sizes", "--total-bytes 109951162777600", "--total-bytes: with these all processes hold about"),
        ("outer_sync", "--workers 1", "argument --workers: 1 is too small; use 2 or more"),
        ("outer_sync", "--workers 2 100", "argument --workers: 100 is too large; use 64 or less"),
        ("outer_sync", "--hidden 1000000", "--layers, --hidden, --vocab, --workers: with these all processes"),
        ("vs_atorch", "--env {file}", "argument --env: {file}: {file} cannot be used: Not a directory; give a folder"),
        ("vs_atorch", "--hidden 1000000", "--layers, --hidden, --vocab, --workers: with these all processes"),
        ("step_overhead", "--block 0", "argument --block: 0 is too small; use 1 or more"),
        ("step_overhead", "--hidden 130", "--hidden 130: give a multiple of 4"),
        ("step_overhead", "--hidden 1000000", "--layers, --hidden: with these all processes hold about"),
        ("step_overhead", "--script {folder}/none.py", "none.py is not a file; give one that is there"),
        ("overlapped_step", "--fragments 5", "--fragments 5: each needs a layer; give 4 or less (--layers)"),
        ("overlapped_step", "--delay 20", "--delay 20: a round is in flight for less than an interval; give less"),
        ("convergence", "--output {file}", "argument --output: {file}: {file} cannot be used: Not a directory"),
        ("convergence", "--output {file}/study", "study: {file} cannot be used: Not a directory; give a folder"),
        ("convergence", "--seeds -1", "argument --seeds: -1 is too small; use 1 or more"),
        ("convergence", "--seeds 1 1", "argument --seeds: 1 is given more than once"),
        ("convergence", "--noise-seeds 4294967296", "argument --noise-seeds: 4294967296 is too large"),
        ("convergence", "--seeds --noise-seeds", "--seeds and --noise-seeds: without any there is nothing to train"),
        ("convergence", "--iterations 25600000000", "give a multiple of 256, such as 2048"),
        ("spes_convergence", "--output {file}", "argument --output: {file}"),
        ("spes_convergence", "--seeds 0", "argument --seeds: 0 is too small"),
        ("hot_switch_convergence", "--output {file}", "argument --output: {file}"),
        ("outer_methods", "nonsense", "argument study: invalid choice: 'nonsense'"),
        ("outer_methods", "schedules --output {file}", "argument --output: {file}"),
        ("muloco_convergence", "--adam-rates nan", "argument --adam-rates: nan cannot be; use a number above 0"),
        ("muloco_convergence", "--muon-rates -0.1", "argument --muon-rates: -0.1 cannot be"),
        ("muloco_convergence", "--hidden 65", "--hidden 65: give a multiple of 8"),
        ("muloco_convergence", "--intervals 16 24", "--iterations 256: give a multiple of 192, so that intervals end"),
        ("muloco_convergence", "--intervals 1 --iterations 4", "--iterations 4: give a multiple of 8"),
        ("muloco_convergence", "--context 1000000", "--layers, --hidden, --context, --sequences: with these all"),
        ("spes_method", "peers --plot {folder}/peers.jpg", "peers.jpg: give a file whose name ends with .png"),
        ("spes_method", "price --output {file}", "argument --output: {file}"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line_and_leaves_nothing(
    name: str, words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "file"
    file.write_text("kept")
    places = {"file": file, "folder": tmp_path}
    assert said.format(**places) in refusal(name, words.format(**places).split(), capsys)
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == "kept"


def test_a_file_that_may_be_written_is_neither_made_nor_emptied(tmp_path: Path):
    file = tmp_path / "report.json"
    assert writable(str(file)) == file and not file.exists()
    file.write_text("kept")
    assert writable(str(file)) == file and file.read_text() == "kept"
    assert picture(str(tmp_path / "a.png")) == tmp_path / "a.png"


def test_a_folder_for_output_is_taken_and_not_made(tmp_path: Path):
    assert folder_for_output(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_a_machine_has_memory_for_are_taken():
    require_memory(argparse.ArgumentParser(), "--layers", 1 << 20)


@pytest.mark.slow
def test_an_option_that_megatron_refuses_is_told_without_a_traceback_of_ours(capsys: pytest.CaptureFixture[str]):
    assert command("overlapped_step").main(["--intervals", "1", "--nonsense-of-megatron", "3"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("python -m benchmarks.overlapped_step: error: ") and "--nonsense-of-megatron" in said


@pytest.mark.parametrize("text", ["0", "-3", "many"])
def test_a_number_below_the_least_is_refused_by_name(text, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=at_least(1))
    with pytest.raises(SystemExit) as exit_request:
        parser.parse_args(["--pairs", text])
    assert exit_request.value.code == 2
    assert "--pairs" in capsys.readouterr().err
    assert parser.parse_args(["--pairs", "1"]).pairs == 1
