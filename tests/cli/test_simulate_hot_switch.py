# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext simulate hot-switch` as people call it."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.hot_switch import PRESETS, read_strategies
from megatron_ext.simulate.hot_switching.document_lengths import SimulatedDocuments
from megatron_ext.simulate.hot_switching.gpu_cluster import GIB, SimulatedCluster
from megatron_ext.simulate.hot_switching.switching_setup import BEST, BEST_RECOMPUTING, SwitchingSetup

MODEL = ["--model", "llama-3b", "--num-layers", "8", "--global-batch-size", "68", "--steps", "3"]
LIST = ["--hot-switch-strategies", "1,8,1", "8,1,1", "--hot-switch-bucket-sizes", "8192", "1024", "0"]
COMMAND = ["simulate", "hot-switch", *MODEL, *LIST]


@pytest.fixture
def lengths(tmp_path: Path) -> list[str]:
    file = tmp_path / "lengths"
    file.write_text("\n".join(map(str, [101] * 40 + [501] * 20 + [2001] * 6 + [8193] * 2)))
    return ["--lengths", str(file)]


def test_a_list_is_shown_beside_three_single_strategies_in_the_same_memory(
    lengths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *lengths, "--memory-gib", "4.7"]) == 0
    said, gains, head, *lines = capsys.readouterr().out.splitlines()
    assert said.startswith("8 GPUs with 4.7 GiB, 3 steps of 68 sequences")
    assert gains.startswith("times are modelled, not measured: hot switching is ")
    assert head.split("  ")[-1].strip() == "best static, recomputing"
    rows = {line[:24].strip(): line[24:].split() for line in lines}
    assert all(float(held) <= 4.7 for held in rows["GiB of the fullest GPU"])
    causes = [float(rows[cause][0]) for cause in ("training", "waiting", "sending", "switching")]
    assert sum(causes) == pytest.approx(100, abs=0.02)
    assert [float(part) for part in rows["switching"][1:]] == [0, 0, 0]


def test_json_has_the_figures_and_the_speed_ups_follow_from_them(
    lengths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *lengths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["hot switching", "home", "best static", "best static, recomputing"]
    assert found["home"]["strategies"] == "1,8,1"
    # All of them train the same tokens, and what may be computed again is a choice more.
    assert len({round(run["tokens_per_second"] * run["seconds"]) for run in found.values()}) == 1
    assert found["best static, recomputing"]["seconds"] <= found["best static"]["seconds"] <= found["home"]["seconds"]
    assert all(sum(run["seconds_by_cause"].values()) == pytest.approx(run["seconds"]) for run in found.values())


def test_a_strategy_computes_again_what_it_must_to_fit(
    lengths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def strategies(*words: str) -> dict[str, str]:
        assert main([*COMMAND, *lengths, *words, "--json"]) == 0
        return {name: run["strategies"] for name, run in json.loads(capsys.readouterr().out).items()}

    assert strategies("--memory-gib", "5")["hot switching"] == "1,8,1 | 8,1,1"
    small = strategies("--memory-gib", "4.7")
    assert small["hot switching"] == "1,8,1 | 8,1,1 full"
    assert small["home"] == "1,8,1"
    # The unfused kernel's scores are what does not fit first.
    assert strategies("--memory-gib", "6", "--hot-switch-attention", "rows")["home"] == "1,8,1 selective"


def test_single_strategies_have_the_choice_to_compute_again_in_a_column_of_their_own() -> None:
    listed = read_strategies(["1,8,1"], [8192, 0])
    setup = SwitchingSetup(
        shape=replace(PRESETS["llama-3b"], num_layers=8),
        strategies=listed,
        # Communication so slow that TP is worth more than its time.
        cluster=SimulatedCluster(memory_gib=2.9, intra_node_bandwidth=1),
        data=SimulatedDocuments(steps=2, global_batch_size=64, mean_length=400, length_spread=1),
    )
    runs = setup.runs()
    assert " full" not in runs[BEST].strategies
    assert runs[BEST_RECOMPUTING].strategies == "1,2,4 full"
    assert runs[BEST_RECOMPUTING].seconds < runs[BEST].seconds
    assert all(run.memory <= 2.9 * GIB for run in runs.values())


def test_kernels_over_whole_rows_cost_single_strategies_more(
    lengths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def gain(kernels: str) -> float:
        assert main([*COMMAND, *lengths, "--hot-switch-attention", kernels, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["home"]["seconds"] / found["hot switching"]["seconds"]

    assert gain("documents") < gain("fused-rows") < gain("rows")


def test_assumed_lengths_and_limits_can_be_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "sweep.csv"
    words = ["--mean-length", "400", "--sweep", "length-spread=0.5,1.5", "--sweep", "memory-gib=5,70"]
    assert main([*COMMAND, *words, "--csv", str(table)]) == 0
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {(row["length-spread"], row["memory-gib"]) for row in rows} == {
        (spread, limit) for spread in ("0.5", "1.5") for limit in ("5", "70")
    }
    assert capsys.readouterr().out.count("hot switching") == 4


def test_a_strategy_file_is_read_with_what_it_computes_again(
    lengths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "strategies.yaml"
    text = "bucket_sizes: [8192, 1024, 0]\nstrategies:\n  - {dp: 1, tp: 8, pp: 1, recompute: full%s}\n"
    text += "  - {dp: 8, tp: 1, pp: 1}\n"
    file.write_text(text % "")
    command = ["simulate", "hot-switch", *MODEL, *lengths, "--hot-switch-strategy-file", str(file)]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hot switching"]["strategies"] == "1,8,1 full | 8,1,1"
    file.write_text(text % ", micro_batch_size: 2")
    assert main(command) == 2
    assert "strategy 1,8,1: micro_batch_size has no time in the cost model; drop it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory-gib", "0.5"], "strategies need 4.5 GiB (in the turn of 8,1,1), and --memory-gib is 0.5"),
        (
            ["--memory-gib", "4.7", "--recompute", "none"],
            "a shorter context (the first of --hot-switch-bucket-sizes), or --recompute needed",
        ),
        (["--memory-gib", "-1"], "--memory-gib is -1; give a number from 0.001 to 1e+06"),
        (["--tflops", "nan"], "--tflops is nan; give a number from 1e-06 to 1e+06"),
        (["--inter-node-bandwidth", "-25"], "--inter-node-bandwidth is -25; give a number from 1e-06 to"),
        (["--steps", "0"], "--steps is 0; give a number from 1 to 100000"),
        (["--global-batch-size", "0"], "--global-batch-size is 0; give a number from 1 to 50000"),
        (["--mean-length", "600"], "give either --lengths or --mean-length"),
        (["--length-spread", "1"], "--length-spread has no effect with --lengths; drop it"),
        (["--hot-switch-strategies", "1,8,1", "8,1,2"], "strategy 8,1,2 is for 16 ranks, but the first strategy"),
        (["--hot-switch-strategies", "1,1,8", "1,1,-8"], 'strategy "1,1,-8" is not of the form dp,tp,pp'),
        (["--hot-switch-strategies", "1,8,1"], "1 strategy needs 2 bucket sizes"),
        (["--hot-switch-strategies", "8,1,1", "1,8,1"], "--global-batch-size 68 is not a multiple of home's dp, 8"),
        (["--hot-switch-gpus-per-node", "3"], "nodes of 3 GPUs; set --hot-switch-gpus-per-node to a divisor of 8"),
        (["--hot-switch-gpus-per-node", "0"], "nodes of 0 GPUs; set --hot-switch-gpus-per-node to a divisor of 8"),
        (["--mean-length", "1e18"], "--mean-length is 1e+18; give a number from 2 to 100000"),
        (["--length-spread", "2.5"], "--length-spread is 2.5; give a number from 0 to 2"),
        (["--memory-gib", "1e300"], "--memory-gib is 1e+300; give a number from 0.001 to 1e+06"),
        (
            ["--hot-switch-bucket-sizes", "8" + "0" * 21, "1024", "0"],
            "--hot-switch-bucket-sizes: the first is a number of more than 20 digits",
        ),
        (["--steps", "100000"], "--steps 100000 of --global-batch-size 68 have more than 1000000 sequences in all"),
        (["--hot-switch-algorithm", "greedy"], "--hot-switch-algorithm is balanced in a simulation; drop it"),
        (["--hot-switch-profile"], "--hot-switch-profile decides over no time and no byte that are simulated"),
        (["--hot-switch-strategy-file", "a.yaml"], "--hot-switch-strategy-file are both given; drop one"),
        (["--moe-router-topk", "2"], "it must be 1, because the model has no experts"),
        (["--sweep", "hot-switch-strategies=8,1,1"], "--hot-switch-strategies is not a setting with one value"),
        (["--model", "llama-1t"], "'llama-1t' is not known"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, lengths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *lengths, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_lengths_of_which_nothing_can_be_predicted_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lengths"
    file.write_text("1\n0\n1\n")
    assert main([*COMMAND, "--lengths", str(file)]) == 2
    assert "--lengths has no document of two or more tokens" in capsys.readouterr().err


def test_documents_beyond_the_context_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths"
    longest = max(int(bound) for bound in COMMAND[COMMAND.index("--hot-switch-bucket-sizes") + 1 :][:2])
    file.write_text(f"{longest + 2}\n{longest + 1}\n50\n50\n")
    assert main([*COMMAND, "--lengths", str(file)]) == 0
    said = f"; 25.00% of the documents are longer than the context of {longest} and become several sequences\n"
    assert said in capsys.readouterr().out
    file.write_text(f"{longest + 1}\n50\n50\n50\n")
    assert main([*COMMAND, "--lengths", str(file)]) == 0
    assert "longer than the context" not in capsys.readouterr().out


def test_lengths_are_not_read_where_the_mean_is_given_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--lengths", "nowhere", "--mean-length", "100"]) == 2
    assert "give either --lengths or --mean-length" in capsys.readouterr().err


def test_missing_bounds_are_asked_for(lengths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "hot-switch", *MODEL, *lengths, "--hot-switch-strategies", "1,8,1", "8,1,1"]) == 2
    assert "--hot-switch-bucket-sizes is missing" in capsys.readouterr().err
