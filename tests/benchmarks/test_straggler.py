# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/straggler.py` for a moment: every method trains, and every case is reported."""

from benchmarks import straggler
from tests.benchmarks.reports import read_cases


def test_every_method_trains_and_is_reported(tmp_path, capsys):
    path = tmp_path / "report.json"
    tiny = ["--slow-by", "3", "--step-ms", "2", "--interval", "4", "--seconds", "0.1", "--numel", "10"]
    assert straggler.main([*tiny, "--json", str(path)]) == 0
    cases = read_cases(path)
    assert list(cases) == ["edit_over_synchronous_x3", "a_edit_over_synchronous_x3", "a_edit_wait_in_slow_steps_x3"]
    assert all(case["value"] > 0 for case in cases.values())
    printed = capsys.readouterr().out
    assert all(method in printed for method in straggler.METHODS)
