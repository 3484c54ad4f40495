# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/spes_convergence` at toy size: a real server and real peers, and what is made of the results."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.convergence.settings import Run
from benchmarks.spes_convergence import __main__ as study_main
from benchmarks.spes_convergence.settings import CENTRALIZED, METHODS, SpesMethod, SpesStudy
from tests.benchmarks.reports import read_cases

SHARED_OUT = SpesMethod(
    name="shared_out",
    title="shared out",
    options={"using_spes": True, "sync_service_interval": 2},
    server={"sync_steps": 2},
    goal=1.5,
)
STARTED = dataclasses.replace(SHARED_OUT, name="started", title="started", started=True)
TOY = {
    "num_layers": 1,
    "num_experts": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "lr_warmup_iters": 0,
    "eval_iters": 1,
    "mock_data": True,
    "data_path": None,
    "data_cache_path": None,
}


@pytest.mark.slow
def test_the_report_compares_peers_with_one_job_and_a_finished_run_is_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    study = SpesStudy(
        output=tmp_path, iterations=8, evaluation=4, methods=(CENTRALIZED, SHARED_OUT, STARTED), peers=2, overrides=TOY
    )
    names = ["centralized", "shared_out", "started"]
    study_main.make_missing(study, names, [7])
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()}
    study_main.make_missing(study, names, [7])
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()} == files
    assert "3 runs of 8 iterations, 0 of them still to make" in capsys.readouterr().out
    one, several, started = (json.loads((tmp_path / "runs" / f"{name}-seed7.json").read_text()) for name in names)
    assert [len(losses) for losses in several["training"]] == [8, 8] and len(one["training"]) == 1
    # Two of eight steps are centralized; peers begin with its weights and the samples of its third step.
    assert [len(losses) for losses in started["training"]] == [6, 6]
    assert sum(losses[0] for losses in started["training"]) / 2 == pytest.approx(one["training"][0][2], rel=1e-6)
    # Peers see other samples, and end with the same model, of which there is one validation loss.
    assert several["training"][0] != several["training"][1]
    assert several["parameters"] == one["parameters"] and several["validation"].keys() == one["validation"].keys()
    study_main.report_on(study, [7], tmp_path / "report.json")
    cases = read_cases(tmp_path / "report.json")
    assert list(cases) == ["shared_out_loss_ratio", "started_loss_ratio"]
    case = cases["shared_out_loss_ratio"]
    assert case["goal"] == 1.5
    assert case["value"] == pytest.approx(several["validation"]["8"] / one["validation"]["8"])
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("sequences", [8, 32])
def test_every_method_sees_the_same_tokens_and_ends_with_a_round(tmp_path: Path, sequences: int):
    study = SpesStudy(output=tmp_path, sequences=sequences)
    assert study.iterations >= 500
    tokens, validated = set(), set()
    for method in METHODS:
        words = study.command(Run(method=method, seed=1), address="127.0.0.1:1")
        batch, evaluations = (int(words[words.index(flag) + 1]) for flag in ("--global-batch-size", "--eval-iters"))
        jobs = 1 if method.server is None else study.peers
        tokens.add(jobs * batch)
        validated.add(batch * evaluations)
        if method.server is not None:
            interval = method.server["sync_steps"]
            assert interval == method.options["sync_service_interval"] == 50
            first = study.start if method.started else 0
            assert (study.iterations - first) % interval == (study.evaluation - first) % interval == 0
    assert len(tokens) == len(validated) == 1


@pytest.mark.parametrize("number", ["0", "600", "-500", "many"])
def test_a_length_at_which_peers_differ_is_refused(number: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        study_main.main(["--iterations", number])
    assert f"argument --iterations: {number!r}: give a multiple of 500" in capsys.readouterr().err
