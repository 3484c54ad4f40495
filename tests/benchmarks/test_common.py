# SPDX-License-Identifier: Apache-2.0
"""The report of a benchmark: what counts as a goal met, the interval of a median, the JSON object."""

import argparse
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.command_line import add_report_option
from benchmarks.common import Case, bootstrap_interval, report
from tests.benchmarks.reports import read_cases


def case(value=1.0, goal=1.25, direction="lower"):
    return Case(case="some_ratio", value=value, unit="ratio", goal=goal, direction=direction)


@pytest.mark.parametrize(
    ("made", "met"),
    [
        (case(1.25), "yes"),
        (case(1.26), "no"),
        (case(1.25, direction="higher"), "yes"),
        (case(1.24, direction="higher"), "no"),
        (case(1.0, goal=None), "-"),
    ],
)
def test_a_goal_is_met_on_the_side_that_the_case_names(made, met):
    assert made.met == met


VALUES = st.lists(st.floats(min_value=0.1, max_value=10), min_size=1, max_size=30)


@given(VALUES)
def test_the_interval_holds_the_median_and_lies_between_the_extremes(values):
    low, high = bootstrap_interval(values, resamples=50)
    assert min(values) <= low <= high <= max(values)
    assert low <= statistics.median(values) <= high or len(values) % 2 == 0


def test_the_interval_of_equal_values_is_a_point_and_a_wider_confidence_gives_a_wider_one():
    assert bootstrap_interval([2.0] * 5, resamples=100) == (2.0, 2.0)
    values = [float(value) for value in range(40)]
    narrow, wide = (bootstrap_interval(values, confidence, resamples=1000) for confidence in (0.5, 0.99))
    assert wide[0] < narrow[0] < 19.5 < narrow[1] < wide[1]
    assert bootstrap_interval(values, 0.5, resamples=1000) == narrow


def test_the_report_is_a_table_for_people_and_one_json_object(tmp_path, capsys):
    path = tmp_path / "report.json"
    report([case(1.5), Case(case="calls", value=0, unit="calls", goal=None, direction="lower")], path)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["some_ratio", "1.5", "ratio", "1.25", "no"] in lines
    assert ["calls", "0", "calls", "-", "-"] in lines
    cases = read_cases(path)
    assert cases["some_ratio"] == {
        "case": "some_ratio",
        "value": 1.5,
        "unit": "ratio",
        "goal": 1.25,
        "direction": "lower",
    }
    assert cases["calls"]["goal"] is None


def test_without_the_option_no_file_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_report_option(parser)
    report([case()], parser.parse_args([]).json)
    assert list(tmp_path.iterdir()) == []
    assert "some_ratio" in capsys.readouterr().out
