# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/switch_plan.py` at its smallest: it runs, and reports what it promises."""

import math
import subprocess
import sys

import pytest

from benchmarks import switch_plan
from megatron_ext.hot_switch import PRESETS, read_strategies
from tests.benchmarks.reports import read_cases
from tests.support.distributed import REPOSITORY


def test_every_number_of_ranks_is_one_case(tmp_path, capsys):
    path = tmp_path / "report.json"
    command = ["--model", "llama-3b", "--ranks", "32", "--repeats", "1", "--json", str(path)]
    assert switch_plan.main(command) == 0
    cases = read_cases(path)
    assert list(cases) == ["plan_seconds_32"]
    case = cases["plan_seconds_32"]
    assert (case["goal"], case["unit"], case["direction"]) == (0.5, "seconds", "lower")
    assert case["value"] > 0
    assert "1,16,2 > 4,2,4 > 2,8,2 > 1,16,2" in capsys.readouterr().out


def test_by_default_a_32b_model_is_planned_for_up_to_1024_ranks():
    options = switch_plan.parser().parse_args([])
    assert (options.ranks, options.model, options.algorithm) == ([32, 256, 1024], "llama-32b", "balanced")
    assert switch_plan.GOALS == {32: 0.5, 256: 3.0, 1024: 20.0}


@pytest.mark.parametrize("ranks", switch_plan.CHAINS)
def test_the_chains_can_hold_the_model_on_that_many_ranks(ranks):
    for texts in switch_plan.CHAINS[ranks]:
        chosen = read_strategies(texts, shape=PRESETS["llama-32b"], world_size=ranks)
        assert all(math.prod((s.dp, s.tp, s.pp)) == ranks for s in chosen.strategies)


@pytest.mark.slow
def test_the_script_starts_by_its_path_from_anywhere(tmp_path):
    script = str(REPOSITORY / "benchmarks" / "switch_plan.py")
    done = subprocess.run(
        [sys.executable, script, "--repeats", "0"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--repeats: 0 is too small; use 1 or more" in done.stderr
