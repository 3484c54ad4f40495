# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/switch.py` and `benchmarks/switch_sizes.py` at toy size: they run, and report what they promise."""

import pytest

from benchmarks import switch, switch_checkpoint, switch_sizes
from benchmarks.ranks import switching
from tests.benchmarks.reports import read_cases
from tests.support.distributed import run_ranks

GOALS = {
    "dp_to_tp_over_bare": 1.2,
    "tp_to_dp_over_bare": 1.2,
    "dp_to_tp_over_least": 1.2,
    "tp_to_dp_over_least": 1.2,
    "over_mcore_unbalanced": 0.67,
    "over_mcore_balanced": 1.0,
    "no_move_ms": 1.0,
    "over_save_load": 0.2,
    "optimizer_bytes_moved": 0,
}


@pytest.mark.slow
def test_every_switch_is_reported_against_its_goals(tmp_path, capsys):
    path = tmp_path / "report.json"
    tiny = ["--layers", "2", "--hidden", "16", "--vocab", "64", "--pairs", "2", "--warmup", "1"]
    # Restarts take half a minute.
    assert switch.main([*tiny, "--checkpoint-pairs", "1", "--restarts", "0", "--json", str(path)]) == 0
    cases = read_cases(path)
    assert {name: case["goal"] for name, case in cases.items()} == GOALS
    assert cases.pop("optimizer_bytes_moved")["value"] == 0
    assert all(case["value"] > 0 and case["direction"] == "lower" for case in cases.values())
    assert "2,1,2 > 1,4,1" in capsys.readouterr().out


def test_the_default_is_more_than_fifty_million_parameters():
    options = switch.parser().parse_args([])
    assert options.pairs >= 7
    assert switch.numel(switch.setting_of(options)) >= 50e6


def test_a_switch_with_wrong_results_is_not_a_measurement():
    import torch

    right = {"weight": torch.ones(3)}
    switching.require_equal({"weight": torch.ones(3)}, right)
    for wrong in ({"weight": torch.zeros(3)}, {}, {**right, "bias": torch.ones(1)}):
        with pytest.raises(RuntimeError, match="not what the target layout holds"):
            switching.require_equal(wrong, right)


def test_the_way_round_by_a_checkpoint_ends_with_the_same_tensors(tmp_path):
    setting = switching.Setting(layers=2, hidden=16, vocab=64, pairs=1, warmup=0)
    # From TP 2 to PP 2, and then as new processes would to DP 2.
    for seconds in run_ranks(switch_checkpoint.rank_seconds, 2, ((1, 2, 1), (1, 1, 2)), setting, str(tmp_path)):
        assert {side: len(values) for side, values in seconds.items()} == {"switch": 1, "save_load": 1}
    assert run_ranks(switch_checkpoint.main, 2, [f"{tmp_path}/0", "2,1,1", "2", "16", "64"]) == [0, 0]


def test_the_size_from_which_parts_travel_alone_is_measured(tmp_path):
    path = tmp_path / "report.json"
    assert switch_sizes.main(["--total-bytes", str(1 << 20), "--pairs", "2", "--json", str(path)]) == 0
    assert read_cases(path)["direct_bytes_gloo"]["value"] in (*switch_sizes.SIZES, 2 * switch_sizes.SIZES[-1])
