# SPDX-License-Identifier: Apache-2.0
"""The command itself, whatever it is asked to do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.cli.command_parser import CommandParser
from megatron_ext.cli.main import main, make_parser
from tests.support.distributed import REPOSITORY


def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    # It waits for the text of a pipe that nobody writes to.
    lengths = tmp_path / "lengths"
    os.mkfifo(lengths)
    command = [sys.executable, "-m", "megatron_ext.cli.main", "hot-switch", "suggest", "--model", "llama-7b"]
    command += ["--gpus", "8", "--context", "4096", "--lengths", str(lengths)]
    suggest = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    with lengths.open("w"):  # opened when the command reads
        suggest.send_signal(signal.SIGINT)
        _, said = suggest.communicate(timeout=60)
    assert (suggest.returncode, said) == (130, "megatron-ext: interrupted\n")


def test_the_command_starts_without_torch():
    code = "import sys, megatron_ext.cli.main as cli; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


SIMULATE = (
    *("simulate", "local-sgd", "--parameters", "1e9", "--step-seconds", "1", "--local-sgd-sync-interval", "10"),
    *("--steps", "100", "--workers", "4", "--bandwidth", "10"),
)


def test_an_output_that_is_full_is_named_in_one_line() -> None:
    command = [sys.executable, "-m", "megatron_ext.cli.main", *SIMULATE]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    said = "megatron-ext: error: the output cannot be written: No space left on device; make room there\n"
    assert (ended.returncode, ended.stderr) == (2, said)


def test_who_has_closed_the_output_gets_the_status_nevertheless() -> None:
    code = "import sys; sys.stdout = None; import megatron_ext.cli.main as cli; sys.exit(cli.main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, *SIMULATE], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is said of words that are refused."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_beginning_of_an_option_is_not_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["server", "start", "--dir", "d", "--peer", "3"], ["local-sgd", "report", "d", "--js"]):
        assert "unrecognized arguments: " in refusal(words, capsys)


def test_every_command_refuses_an_unknown_option_in_one_line_under_its_own_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parsers = list(make_parser()._below())
    assert len(parsers) > 25
    for parser in parsers:
        # Without what a command needs, that is said first.
        said = refusal([*parser.prog.split()[1:], "--no-such-option"], capsys)
        assert said.startswith(f"{parser.prog}: error: ") and said.endswith(f"; see {parser.prog} --help\n")
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("simulate local-sgd --bandwidth", "local-sgd: error: argument --bandwidth: expected one argument; see"),
        ("simulate local-sgd --steps 1.5", "argument --steps: invalid int value: '1.5'"),
        ("simulate local-sgd --steps -1e-9", "argument --steps: invalid int value: '-1e-9'"),
        ("simulate local-sgd --steps inf", "argument --steps: invalid int value: 'inf'"),
        ("simulate local-sgd --tflops -1e9 --steps x", "argument --steps: invalid int value: 'x'"),
        ("hot-switch plan --algorithm best", "argument --algorithm: invalid choice: 'best' (choose from "),
        ("data", "megatron-ext data: error: the following arguments are required: "),
    ],
)
def test_a_value_that_cannot_be_read_is_told_in_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(words.split(), capsys)
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("value", ["-1e9", "-.5E-3", "-1.", "-7", "-inf", "-NaN"])
def test_a_negative_number_is_a_value_however_it_is_written(value: str) -> None:
    suggest = ["local-sgd", "suggest", "--workers", "2", "--step-seconds", "1"]
    options = make_parser().parse_args([*suggest, "--bandwidth", value])
    assert str(options.bandwidth) == str(float(value))


def test_a_strategy_with_a_negative_size_is_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hot-switch", "plan", "--model", "llama-7b", "--strategies", "-1,4,2"]) == 2
    assert 'strategy "-1,4,2" is not of the form' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data prepare x --output-prefix y --text-key content", "data prepare: error: unrecognized arguments: --text-"),
        ("data prepare x --output-prefix y --json-key=k", "arguments: --json-key=k; did you mean --jsonl-key?"),
        ("server start --dir d --skip-anomaly", "--skip-anomaly is given as skip_anomaly in the file of --config"),
        ("patches --chek extra", "patches: error: unrecognized arguments: --chek extra; did you mean --check?"),
        ("explain --num-layers 4", "unrecognized arguments: --num-layers; what Megatron gets comes after --"),
        ("--no-such patches", "megatron-ext: error: unrecognized arguments: --no-such; see megatron-ext --help"),
    ],
)
def test_an_unknown_option_is_told_with_the_one_that_is_nearly_spelled_so(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(words.split(), capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("upcycle", "megatron-ext has no 'upcycle'; did you mean megatron-ext convert upcycle?"),
        ("suggest", "did you mean megatron-ext hot-switch suggest or megatron-ext local-sgd suggest?"),
        ("convert prepare", "megatron-ext convert has no 'prepare'; did you mean megatron-ext data prepare?"),
        ("data patches", "did you mean megatron-ext patches?"),
        ("covnert", "did you mean megatron-ext convert?"),
        ("xyz", "invalid choice: 'xyz'"),
    ],
)
def test_a_command_is_told_where_it_is(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(words.split(), capsys)


def test_the_parsers_of_all_commands_are_of_one_kind() -> None:
    assert all(type(parser) is CommandParser for parser in make_parser()._below())
