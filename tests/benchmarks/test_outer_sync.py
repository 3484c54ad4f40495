# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/outer_sync.py` at toy size: it runs, and reports what it promises."""

import subprocess
import sys

import pytest

from benchmarks import outer_sync, overlapped_step
from benchmarks.common import Case
from benchmarks.ranks import outer_rounds
from tests.benchmarks.reports import read_cases
from tests.support.distributed import REPOSITORY

TINY = ["--layers", "1", "--hidden", "8", "--vocab", "16", "--pairs", "2", "--warmup", "1"]


@pytest.mark.slow
def test_every_method_and_number_of_workers_is_one_case(tmp_path, capsys, monkeypatch):
    path = tmp_path / "report.json"
    asked = []

    def step(options):
        asked.append(options.intervals)
        return Case(case="overlapped_step_ratio", value=1.0, unit="ratio", goal=1.05, direction="lower")

    monkeypatch.setattr(overlapped_step, "measure", step)
    assert outer_sync.main([*TINY, "--workers", "2", "3", "--json", str(path)]) == 0
    cases = read_cases(path)
    ratios = {"diloco_w2_ratio": 1.25, "diloco_w3_ratio": 1.25, "penalty_w2_ratio": 1.5, "penalty_w3_ratio": 1.5}
    least = {name.replace("_ratio", "_over_least"): goal for name, goal in ratios.items()}
    processor = {name.replace("_ratio", "_processor_ratio"): 1.3 for name in ratios}
    wire = {"wire_bytes_bf16": 0.53, "wire_bytes_int8": 0.28, "wire_bytes_4bit": 0.15}
    step_ratio = {"overlapped_step_ratio": 1.05}
    goals = {**ratios, **least, **processor, **wire, **step_ratio}
    assert {name: case["goal"] for name, case in cases.items()} == goals
    assert asked == [12]
    for name, case in cases.items():
        assert (case["unit"], case["direction"]) == ("ratio", "lower")
        assert case["value"] > 0
        assert name in {**ratios, **least, **processor} or case["value"] <= case["goal"]
    assert "diloco_w3_ratio" in capsys.readouterr().out


def test_an_outer_step_touches_each_value_of_the_model_this_often_at_least():
    # Two workers own a half each: two terms, anchor and momentum both ways, and the result, of 4 bytes.
    assert outer_sync.touched(2, guarded=False) == (2 * 4 + 2 * 4 + 2 * 4 + 4) / 2
    # The same in three passes: terms and anchor twice, and between them the mean is written and read.
    assert outer_sync.touched(2, guarded=True) == (2 * (2 * 4 + 4) + 2 * 4 + 2 * 4 + 2 * 4 + 4) / 2


def test_a_round_takes_at_least_its_all_reduce_and_what_the_outer_step_touches():
    # A copy touches 8 bytes of each value, the step of two workers 14.
    assert outer_sync.least_seconds([1.0, 2.0], [0.4, 0.8], 2, guarded=False) == pytest.approx([1.7, 3.4])


def test_the_default_is_more_than_fifty_million_parameters_for_two_and_four_workers():
    options = outer_sync.parser().parse_args([])
    assert options.workers == [2, 4]
    assert options.pairs >= 7
    assert outer_rounds.numel(outer_rounds.shapes(options.layers, options.hidden, options.vocab)) >= 50e6


def test_the_script_starts_by_its_path_from_anywhere(tmp_path):
    script = str(REPOSITORY / "benchmarks" / "outer_sync.py")
    done = subprocess.run(
        [sys.executable, script, "--workers", "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--workers: 1 is too small; use 2 or more" in done.stderr


def test_workers_that_differ_after_a_round_are_no_measurement():
    """The benchmark's own check of what it measured can fail."""
    from tests.support.distributed import RankFailure, run_ranks

    with pytest.raises(RankFailure, match="values differ after a round"):
        run_ranks(unequal_values, 2)


def unequal_values():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    outer_rounds.require_equal([torch.full((3,), float(dist.get_rank()))])
