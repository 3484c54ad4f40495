# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/step_overhead.py` at toy size: both sides run by turns, compute the same, and are reported."""

import pytest

from benchmarks import step_overhead
from benchmarks.ranks.jobs_by_turns import LOCAL_SGD, STOCK, Outcome, require_equal_weights
from tests.benchmarks.reports import read_cases

TINY = [
    *("--iterations", "4", "--block", "2", "--warmup-blocks", "1", "--instrumented-iterations", "3"),
    *("--layers", "1", "--hidden", "16", "--seq-length", "16", "--micro-batch-size", "1"),
]


def test_the_report_has_its_three_cases_and_nothing_crosses_workers(tmp_path, capsys):
    path = tmp_path / "report.json"
    # An option of Megatron's goes to both sides.
    assert step_overhead.main([*TINY, "--json", str(path), "--use-distributed-optimizer"]) == 0
    cases = read_cases(path)
    assert list(cases) == ["step_time_ratio", "hook_microseconds_per_step", "cross_worker_collectives_per_step"]
    assert (cases["step_time_ratio"]["goal"], cases["step_time_ratio"]["unit"]) == (1.01, "ratio")
    assert cases["step_time_ratio"]["value"] > 0
    assert cases["hook_microseconds_per_step"]["value"] > 0
    crossing = cases["cross_worker_collectives_per_step"]
    assert (crossing["value"], crossing["goal"], crossing["direction"]) == (0, 0, "lower")
    printed = capsys.readouterr().out
    assert "95 % interval" in printed
    assert "cross_worker_collectives_per_step" in printed


def test_the_defaults_measure_two_hundred_iterations_and_more():
    assert step_overhead.parser().parse_args([]).iterations >= 200


def outcome(side, worker, weights):
    return Outcome(side=side, worker=worker, seconds=[1.0], weights=weights)


def test_sides_that_computed_something_else_are_no_comparison():
    same = [outcome(side, worker, f"weights {worker}") for side in (LOCAL_SGD, STOCK) for worker in (0, 1)]
    require_equal_weights(same)
    with pytest.raises(RuntimeError, match="worker 1 and the stock job fed its samples ended with different weights"):
        require_equal_weights([*same[:3], outcome(STOCK, 1, "others")])


def test_a_block_without_iterations_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_request:
        step_overhead.main(["--block", "0"])
    assert exit_request.value.code == 2
    assert "--block: 0 is too small; use 1 or more" in capsys.readouterr().err
