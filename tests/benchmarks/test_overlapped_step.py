# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/overlapped_step.py` at toy size: both jobs run by turns, and one of them meets."""

import pytest

from benchmarks import overlapped_step
from tests.benchmarks.reports import read_cases

TINY = ["--intervals", "2", "--interval", "4", "--fragments", "2", "--layers", "2", "--hidden", "16"]


@pytest.mark.slow
def test_the_report_has_its_case(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert overlapped_step.main([*TINY, "--json", str(path)]) == 0
    (case,) = read_cases(path).values()
    assert (case["case"], case["goal"], case["direction"]) == ("overlapped_step_ratio", 1.05, "lower")
    assert case["value"] > 0
    assert "2 fragments, interval 4, delay 2" in capsys.readouterr().out


def test_only_one_side_streams():
    plan = overlapped_step.StreamingPlan(
        arguments=(),
        micro_batch_size=1,
        ranks_per_worker=1,
        blocks=1,
        block=1,
        ports=(),
        script="",
        stock_only=False,
        streaming=("--local-sgd-fragments", "2"),
    )
    assert "--local-sgd-fragments" in plan.command_line(overlapped_step.STREAMING, 1)
    assert "--local-sgd-fragments" not in plan.command_line(overlapped_step.APART, 1)
