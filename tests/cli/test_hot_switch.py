# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext hot-switch plan` as typed by a user."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.cli.main import main

PLAN = ["hot-switch", "plan"]
CASE = [*PLAN, "--model", "llama-7b", "--gpus-per-node", "8", "--strategies", "1,4,2", "8,1,1", "2,2,2"]


def test_the_table_has_a_row_per_switch_in_the_order_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CASE, "--bucket-sizes", "16384", "8192", "4096", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "6.73 billion parameters, 12.53 GiB in bf16, on 8 ranks, 8 per node; senders: balanced",
        "  home  1,4,2: 8192 < length <= 16384",
        "  guest 8,1,1: 0 < length <= 4096",
        "  guest 2,2,2: 4096 < length <= 8192",
    ]
    assert [" ".join(line.split()) for line in lines[7:10]] == [
        "1,4,2 8,1,1 87.71 0.00 10.96 10.96 56 1.57 12.53 14.10 58.9",
        "8,1,1 2,2,2 0.00 0.00 0.00 0.00 0 12.53 3.13 14.80 0.0",
        "2,2,2 1,4,2 6.26 0.00 0.80 1.57 8 3.13 1.57 4.70 8.4",
    ]
    assert lines[10].startswith("together 93.97 GiB, 0.00 of it between nodes; at least 67.3 ms at 200 GB/s")


def test_the_json_object_lists_the_closed_chain_of_switches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--model", "llama-7b", "--strategies", "2,4,2", "16,1,1", "4,4,1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [(switch["from"], switch["to"]) for switch in content["switches"]] == [
        ("2,4,2", "16,1,1"),
        ("16,1,1", "4,4,1"),
        ("4,4,1", "2,4,2"),
    ]
    nothing = dict.fromkeys(("bytes_total", "bytes_inter_node", "max_sent", "max_received", "messages"), 0)
    first, *others = ({key: switch[key] for key in nothing} for switch in content["switches"])
    assert [set(switch) for switch in content["switches"]] == [{"from", "to", *nothing}] * 3
    assert others == [nothing] * 2
    assert {key: round(value / 2**30, 2) for key, value in first.items() if key != "messages"} == {
        "bytes_total": 175.42,
        "bytes_inter_node": 100.24,
        "max_sent": 10.96,
        "max_received": 10.96,
    }
    assert first["messages"] == 120
    estimate = content["estimates"][0]
    assert (estimate["slices"], estimate["from"]) == (8320, "2,4,2")
    assert estimate["max_held_before"] < estimate["max_held_after"] < estimate["max_held_during"]
    assert estimate["seconds"] == pytest.approx(first["bytes_inter_node"] / 16 / 25e9, rel=1e-3)


def test_gradients_go_home_or_to_the_next_guest_whichever_moves_fewer_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    github = ["hot-switch", "plan", "--model", "llama-13b", "--strategies", "2,8,1", "8,2,1", "4,2,2", "4,4,1"]
    assert main([*github, "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["gradients"]
    assert [(way["from"], way["to"]) for way in ways] == [("8,2,1", "4,2,2"), ("4,2,2", "2,8,1"), ("4,4,1", "2,8,1")]
    sizes = ("bytes_total", "bytes_inter_node", "bytes_if_home", "bytes_if_next")
    assert [[way[size] and round(way[size] / 2**30, 1) for size in sizes] for way in ways] == [
        [0, 0, 48.4, 0],
        [72.7, 48.5, 72.7, 145.3],
        [72.6, 0, 72.6, None],
    ]
    assert all(way["max_sent"] < way["bytes_total"] or way["bytes_total"] == 0 for way in ways)
    assert main(github) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[-3:]]
    assert rows[0] == "8,2,1 4,2,2 0.00 0.00 0.00 0.00 0 48.43 0.00 0.0"


def test_bandwidths_and_algorithms_change_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(*options: str) -> float:
        assert main([*CASE, "--json", *options]) == 0
        return sum(entry["seconds"] for entry in json.loads(capsys.readouterr().out)["estimates"])

    assert seconds("--intra-node-bandwidth", "100") == pytest.approx(2 * seconds())
    assert seconds("--algorithm", "fcfs") > seconds()


def test_a_model_can_be_described_by_megatrons_flags(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"--num-layers": 32, "--hidden-size": 4096, "--num-attention-heads": 32, "--padded-vocab-size": 30592}
    flags = ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    described = [*(str(part) for pair in sizes.items() for part in pair), *flags]
    assert main([*PLAN, *described, "--strategies", "1,4,2", "8,1,1", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    # Megatron's default width of a gated MLP is 10880 here, the preset's 11008.
    assert main([*PLAN, "--model", "llama-7b", "--ffn-hidden-size", "10880", *CASE[6:9], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["switches"] == ours["switches"]


def test_every_flag_of_the_model_changes_what_moves(capsys: pytest.CaptureFixture[str]) -> None:
    def moved(*options: str) -> int:
        base = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--padded-vocab-size", "128"]
        assert main([*PLAN, *base, "--strategies", "1,2,2", "4,1,1", "--json", *options]) == 0
        return int(json.loads(capsys.readouterr().out)["switches"][0]["bytes_total"])

    changes = [
        *(["--ffn-hidden-size", "128"], ["--num-query-groups", "2"], ["--kv-channels", "32"], ["--num-experts", "4"]),
        *(["--num-experts", "4", "--moe-ffn-hidden-size", "32"], ["--normalization", "RMSNorm"], ["--swiglu"]),
        *(["--disable-bias-linear"], ["--disable-bias-linear", "--add-qkv-bias"], ["--qk-layernorm"]),
        ["--untie-embeddings-and-output-weights"],
        ["--num-experts", "4", "--moe-shared-expert-intermediate-size", "32"],
        ["--position-embedding-type", "learned_absolute", "--max-position-embeddings", "64"],
    ]
    found = [moved(), *(moved(*change) for change in changes)]
    assert len(set(found)) == len(found)


def test_one_strategy_has_nothing_to_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--model", "llama-3b", "--strategies", "8,1,1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "one strategy: there is nothing to switch"
    assert main([*PLAN, "--model", "llama-3b", "--strategies", "8,1,1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["switches"] == []


def test_strategies_can_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "strategies.yaml"
    file.write_text("strategies:\n- {dp: 1, tp: 2, pp: 2, vpp: 2}\n- {dp: 2, tp: 1, pp: 1, cp: 2}\n")
    assert main([*PLAN, "--model", "llama-3b", "--strategy-file", str(file), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["switches"][0]
    assert (first["from"], first["to"]) == ("1,2,2 vpp2", "2,1,1 cp2")
    assert main([*PLAN, "--model", "llama-3b", "--strategy-file", str(file), "--bucket-sizes", "4", "0"]) == 2
    assert "write bucket_sizes into the strategy file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "llama-8b", "--strategies", "8,1,1"], "'llama-8b' is not known; use one of llama-3b, llama-7b"),
        (["--model", "llama-7b", "--num-layers", "9999999", "--strategies", "8,1,1"], "--num-layers: is 9999999; mod"),
        (["--model", "llama-7b", "--num-experts", "99999", "--strategies", "8,1,1"], "is 32, with 99999 experts in"),
        (["--num-layers", "2", "--strategies", "8,1,1"], "3. --padded-vocab-size is missing; give it, or a preset"),
        (["--model", "llama-3b"], "give either --strategies"),
        (["--model", "llama-3b", "--strategies", "8,1,1", "--strategy-file", "x"], "give either --strategies"),
        (["--model", "llama-3b", "--strategies", "8,1,1", "4,1,1"], "strategy 4,1,1 is for 4 ranks"),
        (["--model", "llama-3b", "--strategies", "8,1,1", "--world-size", "4"], "but the job has 4"),
        (["--model", "llama-3b", "--strategies", "6,1,1", "3,2,1", "--gpus-per-node", "4"], "do not fill nodes of 4"),
        (["--model", "llama-3b", "--strategies", "8,1,1", "--gpus-per-node", "-3"], "do not fill nodes of -3"),
        (["--model", "llama-3b", "--strategies", "8,1,1", "--gpus-per-node", "3"], "do not fill nodes of 3"),
        ([*CASE[2:], "--intra-node-bandwidth", "0"], "--intra-node-bandwidth is 0; give GB/s, a finite number"),
        ([*CASE[2:], "--world-size", "0"], "--world-size is 0; it must be at least 1"),
        ([*CASE[2:], "--inter-node-bandwidth", "inf"], "--inter-node-bandwidth is inf; give GB/s, a finite number"),
        ([*CASE[2:], "--intra-node-bandwidth", "1e-320"], "give GB/s, a finite number from 1e-6 on"),
        ([*CASE[2:], "--inter-node-bandwidth", "nan"], "--inter-node-bandwidth is nan; give GB/s, a finite number"),
        (["--model", "llama-3b", "--num-query-groups", "5", "--strategies", "8,1,1"], "--num-query-groups 5; change"),
        (
            ["--model", "llama-3b", "--position-embedding-type", "learned_absolute", "--strategies", "8,1,1"],
            "--max-position-embeddings: give it with",
        ),
    ],
)
def test_bad_input_gets_one_error(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *arguments]) == 2
    output = capsys.readouterr()
    assert complaint in output.err
    assert output.out == ""


def test_the_planner_never_imports_megatron() -> None:
    script = (
        f"import sys; from megatron_ext.cli.main import main; main({CASE!r}); print('megatron.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
