# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/diloco_bandwidth.py`: the papers' figures, and ours where the methods are the same."""

import pytest

from benchmarks import diloco_bandwidth
from tests.benchmarks.reports import read_cases


def test_a_delay_that_hides_each_way_by_a_step_needs_the_published_bandwidth(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert diloco_bandwidth.main(["--tables", "streaming", "--models", "1B", "--json", str(path)]) == 0
    cases = read_cases(path)
    assert len(cases) == 7
    same = [case["value"] for name, case in cases.items() if "tau_2" in name]
    assert len(same) == 2 and all(abs(value) <= 1 for value in same)
    assert "1.4 / 1.4 (+0)" in capsys.readouterr().out


def test_published_figures_are_places_of_the_papers_grid():
    for row in (*diloco_bandwidth.STREAMING, *diloco_bandwidth.SCALING_LAWS):
        for published in row.published:
            place = diloco_bandwidth.place_of(published)
            if place < len(diloco_bandwidth.GRID):
                assert diloco_bandwidth.GRID[place] == pytest.approx(published, rel=0.15, abs=0.06), row
        assert list(row.published) == sorted(row.published), row


def test_the_least_bandwidth_that_is_enough_is_found():
    grid = diloco_bandwidth.GRID
    for place in (0, 1, 17, 49):
        assert diloco_bandwidth.least(lambda gbits, enough=grid[place]: gbits >= enough) == place
    assert diloco_bandwidth.least(lambda gbits: False) == len(grid)
