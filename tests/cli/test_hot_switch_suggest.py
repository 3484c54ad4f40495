# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext hot-switch suggest` as typed by a user."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_ext.cli.main import main


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    lengths = [101] * 40 + [501] * 20 + [2001] * 6 + [8193] * 2
    (tmp_path / "lengths").write_text("\n".join(map(str, lengths)))
    text = "hot-switch suggest --model llama-3b --num-layers 8 --gpus 8 --context 8192 --global-batch-size 68 "
    return [
        *shlex.split(text + "--memory-gib 2.3 --tflops 100 --margin 0.01 --bounds 2048 1024 --lengths"),
        str(tmp_path / "lengths"),
    ]


def test_the_report_ends_with_flags_that_plan_accepts(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("times are modelled, not measured; 68 sequences a step")
    assert "times as fast as the best single strategy" in lines[-3]
    flags = shlex.split(lines[-1])
    strategies = flags[1 : flags.index("--hot-switch-bucket-sizes")]
    sizes = [flag for flag in flags[flags.index("--hot-switch-bucket-sizes") + 1 :] if flag.isdigit()]
    plan = ["hot-switch", "plan", "--model", "llama-3b", "--num-layers", "8", "--strategies", *strategies]
    assert main([*plan, "--bucket-sizes", *sizes, "--seq-length", "8192"]) == 0


@pytest.mark.parametrize("memory", ["6.5", "70"], ids=["a list", "one strategy"])
def test_what_is_not_default_is_among_the_flags(
    command: list[str], memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--memory-gib", memory, "--gpus-per-node", "4", "--attention", "rows"]) == 0
    flags = capsys.readouterr().out.splitlines()[-1]
    assert flags.startswith("--hot-switch-strategies ")
    assert flags.endswith(" --hot-switch-gpus-per-node 4 --hot-switch-attention rows")


def test_switching_is_not_suggested_for_a_gain_within_the_error_of_the_times(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["worth_switching"]
    (best, *_), gain = content["static"], content["predicted_speedup"] - 1
    assert main([*command, "--margin", str(1.01 * gain)]) == 0
    said, _, flags = capsys.readouterr().out.splitlines()[-3:]
    assert said.startswith("not worth switching: the gain is within the error of the times")
    assert shlex.split(flags)[:2] == ["--hot-switch-strategies", *best["strategies"]]
    assert main([*command, "--margin", str(0.99 * gain)]) == 0
    assert "not worth switching" not in capsys.readouterr().out


def test_documents_that_are_longer_than_the_context_are_named(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths").write_text("\n".join(map(str, [101] * 66 + [8193, 8194, 90000])))
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["documents"], content["documents_beyond_context"]) == (69, 2)
    assert main(command) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("2 of 69 documents are longer than --context 8192, the longest has 90000 tokens")


def test_what_does_not_fit_may_with_recomputation_whose_flags_are_printed(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small = [*command, "--memory-gib", "1.5"]
    assert main(small) == 2
    assert "use more GPUs, a shorter context, or --recompute full" in capsys.readouterr().err
    assert main([*small, "--recompute", "full"]) == 0
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert flags in capsys.readouterr().out.splitlines()[-1]
    assert main([*small, "--recompute", "full", "--memory-gib", "0.1"]) == 2
    assert "--recompute" not in capsys.readouterr().err


def test_the_json_object_compares_the_suggestion_with_every_single_strategy(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    static, found = content["static"], content["suggestion"]
    assert content["predicted_speedup"] == pytest.approx(static[0]["seconds"] / found["seconds"])
    assert content["predicted_speedup"] > 1
    assert found["seconds"] == pytest.approx(sum(found["compute_seconds"]) + found["switching_seconds"])
    assert len(found["strategies"]) == len(found["bucket_sizes"]) - 1 > 1


def test_measured_times_change_the_choice(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A machine that is far slower than the model of one.
    (tmp_path / "times").write_text(json.dumps({"8,1": [0.0, 2.0, 0.0], "4,1": [0.0, 5.0, 0.0]}))
    assert main([*command, "--memory-gib", "70", "--times", str(tmp_path / "times"), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [found["strategies"] for found in content["static"]] == [["1,8,1"], ["2,4,1"]]
    assert set(content["suggestion"]["strategies"]) <= {"1,8,1", "2,4,1"}


def test_measured_times_of_what_is_not_possible_are_left_out_and_named(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linear = {"8,1": 2.0, "1,3": 1.0, "16,1": 1.0}
    (tmp_path / "times").write_text(json.dumps({key: [0.0, seconds, 0.0] for key, seconds in linear.items()}))
    assert main([*command, "--memory-gib", "70", "--times", str(tmp_path / "times")]) == 0
    assert "measured, but not possible for this model on 8 GPUs: 1,3 and 16,1\n" in capsys.readouterr().out


def test_measured_times_of_nothing_that_is_possible_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "times").write_text(json.dumps({"16,1": [0.0, 2.0, 0.0]}))
    assert main([*command, "--times", str(tmp_path / "times")]) == 2
    assert "no (TP, PP) that was measured (16,1) is possible for this model on 8 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tflops", "0"], "--tflops is 0; it must be a finite number above 0"),
        (["--tflops", "inf"], "--tflops is inf; it must be a finite number above 0"),
        (["--margin", "-1"], "--margin is -1; it must be a finite number, 0 or above"),
        (["--bounds", "9000"], "--bounds has 9000; it must be above 0 and below --context 8192"),
        (["--gpus", "100000000"], "--gpus is 100000000; lists are compared for up to 16384"),
        (["--num-experts", "-2"], "--num-experts must be at least 1, got -2"),
        (["--num-experts", "4", "--moe-router-topk", "9"], "from 1 to the number of experts, 4"),
        (["--moe-router-topk", "2"], "it must be 1, because the model has no experts"),
        (["--gpus", "12"], "--gpus 12 do not fill nodes of --gpus-per-node 8"),
        (["--memory-gib", "0.1"], "use more GPUs, a shorter context"),
        (["--times", "/no/such/file"], "--times /no/such/file: cannot be read"),
    ],
)
def test_bad_input_is_refused_by_name(
    command: list[str], options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("again", ["1,1", " 1,1", "1,01"])
def test_times_that_are_given_twice_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], again: str
) -> None:
    (tmp_path / "times").write_text(f'{{"1,1": [1, 1, 1], "{again}": [2, 2, 2]}}')
    assert main([*command, "--times", str(tmp_path / "times")]) == 2
    assert "'1,1' is there twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "times",
    [
        *("[]", "{}", '{"a": [1, 1, 1]}', '{"1,1": ["1", 1, 1]}', '{"1,1": [true, 1, 1]}', '{"1,1": 5}'),
        *('{"8": [1, 2]}', '{"1,1": [NaN, 1, 1]}', '{"1,1": [-1, -1, -1]}', '{"1,1": [0, 0, 0]}', '{"0,1": [1, 1, 1]}'),
    ],
)
def test_times_of_another_form_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], times: str
) -> None:
    (tmp_path / "times").write_text(times)
    assert main([*command, "--times", str(tmp_path / "times")]) == 2
    assert 'by "tp,pp" the numbers a, b, c' in capsys.readouterr().err


@pytest.mark.parametrize("context", [8200, 8195])
def test_any_context_gets_a_suggestion_whose_rows_can_be_cut(
    command: list[str], context: int, capsys: pytest.CaptureFixture[str]
) -> None:
    at = command.index("--context")
    changed = [*command[: at + 1], str(context), *command[at + 2 :]]
    del changed[changed.index("--bounds") : changed.index("--lengths")]
    changed[changed.index("--memory-gib") + 1] = "70"
    assert main([*changed, "--json"]) == 0
    for found in json.loads(capsys.readouterr().out)["static"]:
        (label,) = found["strategies"]
        assert context % int(label.split(",")[1]) == 0
