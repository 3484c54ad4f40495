# SPDX-License-Identifier: Apache-2.0
"""The report of a benchmark: what counts as a goal met, the interval of a median, the JSON object."""

import argparse
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import spes_round, straggler, switch, switch_plan, switch_sizes
from benchmarks.common import Case, add_report_option, at_least, bootstrap_interval, report
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


@pytest.mark.parametrize("text", ["0", "-3", "many"])
def test_a_number_below_the_least_is_refused_by_name(text, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=at_least(1))
    with pytest.raises(SystemExit) as exit_request:
        parser.parse_args(["--pairs", text])
    assert exit_request.value.code == 2
    assert "--pairs" in capsys.readouterr().err
    assert parser.parse_args(["--pairs", "1"]).pairs == 1


@pytest.mark.parametrize(
    ("benchmark", "options", "said"),
    [
        (spes_round, ["--peers", "2", "3"], "--peers 3: 16 experts cannot be shared out evenly; give --experts"),
        (switch_plan, ["--model", "llama-13b", "--ranks", "32"], "--model llama-13b, --ranks 32: "),
        (switch, ["--layers", "3"], "--layers, --hidden, --vocab: "),
        (switch_sizes, ["--chunk-bytes", "1500000"], "--chunk-bytes: '1500000': give a multiple of 1048576"),
        (straggler, ["--seconds", "0.01"], "--seconds 0.01: a step of the slow worker takes 0.08 s; train for longer"),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else None,
)
def test_what_cannot_be_measured_is_refused_in_one_line(benchmark, options, said, capsys):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(options)
    assert caught.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]
