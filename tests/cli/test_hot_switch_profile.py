# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext hot-switch profile`: stages are really run, and bad input is named."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli import hot_switch_profile
from megatron_ext.cli.hot_switch_profile import _write, stage_arguments
from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.hot_switch import PRESETS
from megatron_ext.params import GptShape
from tests.support.distributed import REPOSITORY, run_ranks
from tests.support.processes import marked_processes
from tests.support.waiting import until

STAGE = replace(
    PRESETS["llama-3b"],
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    padded_vocab_size=64,
)


def time_stage(arguments: list[str]) -> int:
    from megatron_ext.hot_switch.cost_model import stage_timing

    return stage_timing.main(arguments)


EXPERTS = replace(STAGE, num_moe_experts=4, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=32)


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (STAGE, ["--recompute", "selective"]),
        (STAGE, ["--attention", "rows"]),
        (EXPERTS, ["--moe-router-topk", "2"]),
    ],
    ids=["by document", "by row", "experts"],
)
def test_a_stage_runs_on_tensor_parallel_ranks(
    tmp_path: Any, stage: GptShape, options: list[str]
) -> None:
    output = tmp_path / "seconds.json"
    arguments = ["--shape", stage_arguments(stage), "--lengths", "16", "64", "1024", "--repeats", "2"]
    assert run_ranks(time_stage, 2, [*arguments, *options, "--output", str(output)]) == [0, 0]
    seconds = json.loads(output.read_text())
    assert len(seconds) == 3 and 0 < min(seconds) <= max(seconds) < 60


@pytest.mark.parametrize("shape", [STAGE, EXPERTS, *PRESETS.values()], ids=["other", "experts", *PRESETS])
def test_a_stage_survives_its_way_to_other_processes(shape: GptShape) -> None:
    assert replace(GptShape(**json.loads(stage_arguments(shape))), dtype=shape.dtype) == shape


def test_every_mistake_is_named_at_once(tmp_path: Any, capsys: Any) -> None:
    bad = ["--lengths", "100", "100", "--tp", "3", "0", "--repeats", "0", "--moe-router-topk", "2"]
    bad += ["--output", str(tmp_path / "no/such.json")]
    assert main(["hot-switch", "profile", "--model", "llama-7b", *bad]) == 2
    said = capsys.readouterr().err
    for part in (
        "--tp has 0",
        "--lengths needs three different lengths",
        "--repeats is 0",
        "--moe-router-topk is 2",
        "--tp 3: 32 attention heads cannot be divided over tp = 3",
        "--lengths cannot all be divided by --tp 3",
        "there is no folder",
    ):
        assert part in said


def test_what_no_stage_can_be_is_said_before_anything_is_measured(tmp_path: Any, capsys: Any) -> None:
    shape = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--padded-vocab-size", "130"]
    bad = [*shape, "--lengths", "16", "32", "64", "--tp", "4", "--pp", "3", "--output", str(tmp_path)]
    assert main(["hot-switch", "profile", *bad]) == 2
    said = capsys.readouterr().err
    for part in ("--tp 4: a vocabulary of 130 rows", "--pp 3: 2 layers cannot be divided", "is a folder; name a file"):
        assert part in said


def test_a_file_that_cannot_be_written_is_named_and_keeps_what_it_has(tmp_path: Path) -> None:
    kept = tmp_path / "times.json"
    kept.write_text("{}")
    _write(kept, "")  # as before anything is measured
    assert kept.read_text() == "{}"
    for file, problem in ((Path("/dev/full"), "No space left on device"), (tmp_path / "no" / "file", "No such file")):
        with pytest.raises(UserError, match=f"--output {file}: cannot be written: {problem}"):
            _write(file, "{}")


@pytest.mark.slow
def test_a_measurement_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    shape = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--padded-vocab-size", "128"]
    endless = ["--lengths", "16", "128", "512", "--repeats", "1000000", "--output", str(tmp_path / "times.json")]
    command = [sys.executable, "-m", "megatron_ext.cli.main", "hot-switch", "profile", *shape, *endless]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    profile = subprocess.Popen(command, cwd=REPOSITORY, env=environment)
    try:
        # This command is the first of them.
        until(lambda: len(marked_processes("TMPDIR", str(temporary))) > 2, "torchrun and its process")
        profile.terminate()
        assert profile.wait(60) == 128 + signal.SIGTERM
    finally:
        profile.kill()
    assert marked_processes("TMPDIR", str(temporary)) == []
    assert list(tmp_path.iterdir()) == [temporary] and list(temporary.iterdir()) == []


def test_measured_times_are_written_for_suggest(tmp_path: Any, capsys: Any) -> None:
    output = tmp_path / "times.json"
    shape = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--padded-vocab-size", "128"]
    lengths = ["16", "128", "512"]
    sizes = ["--tp", "2", "--pp", "2", "--lengths", *lengths, "--repeats", "1"]
    assert main(["hot-switch", "profile", *shape, *sizes, "--output", str(output)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:7] == ["tp,pp", *(part for length in lengths for part in (length, "ms"))]
    assert said[1].split()[0] == "2,2" and said[1].endswith("%")
    times = [float(value) for value in said[1].split()[1:4]]
    assert min(times) > 0 and f"suggest --times {output}" in said[-1]
    (coefficients,) = json.loads(output.read_text()).values()
    assert len(coefficients) == 3 and min(coefficients) >= 0 < max(coefficients)
    (tmp_path / "lengths.txt").write_text("".join(f"{length}\n" for length in (20, 40, 300, 500) * 25))
    asked = ["--lengths", str(tmp_path / "lengths.txt"), "--context", "512", "--gpus", "4", "--times", str(output)]
    assert main(["hot-switch", "suggest", *shape, *asked, "--global-batch-size", "16"]) == 0
    assert "--hot-switch-strategies" in capsys.readouterr().out


def test_times_that_are_no_sum_of_such_terms_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {1: [1.6, 0.3, 0.4], 2: [0.1, 0.2, 0.4]}
    monkeypatch.setattr(hot_switch_profile, "_measure", lambda stage, tp, options: seconds[tp])
    shape = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--padded-vocab-size", "128"]
    asked = ["--tp", "1", "2", "--lengths", "64", "128", "256", "--output", str(tmp_path / "times.json")]
    assert main(["hot-switch", "profile", *shape, *asked]) == 0
    assert "no a, b, c come near the times of 1,1, and `suggest` would" in capsys.readouterr().out
