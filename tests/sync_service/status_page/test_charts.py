# SPDX-License-Identifier: Apache-2.0
"""Charts are well-formed, keep to their frame, and say what they show."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.sync_service.status_page.charts import ChartLine, bar_chart, line_chart, spread
from megatron_ext.sync_service.status_page.text import bytes_text, figure_text, seconds_text

finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)
by_round = st.dictionaries(st.integers(0, 700), finite, min_size=1, max_size=40)


@settings(max_examples=40)
@given(st.lists(by_round, min_size=1, max_size=4))
def test_lines_are_inside_the_frame_whatever_their_values(drawn: list[dict[int, float]]):
    lines = [ChartLine(label=f"p{index}", colour="red", values=values) for index, values in enumerate(drawn)]
    svg = ElementTree.fromstring(line_chart(lines, figure_text))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    points = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in svg.iter("circle")]
    for line in svg.iter("polyline"):
        points += [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert points and all(0 <= x <= width and 0 <= y <= height for x, y in points)
    assert 2 <= len(list(svg.iter("line"))) <= 7


@settings(max_examples=40)
@given(st.dictionaries(st.integers(0, 700), st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), min_size=1))
def test_bars_stand_on_the_ground_and_on_each_other(bars: dict[int, tuple[float, float]]):
    svg = ElementTree.fromstring(bar_chart(bars, [("a", "red"), ("b", "blue")], seconds_text))
    rects = [{key: float(rect.attrib[key]) for key in ("y", "height")} for rect in svg.iter("rect")]
    ground = max(float(line.attrib["y1"]) for line in svg.iter("line"))
    for lower, upper in zip(rects[::2], rects[1::2], strict=True):
        assert lower["y"] + lower["height"] == pytest.approx(ground, abs=0.2)
        assert upper["y"] + upper["height"] == pytest.approx(lower["y"], abs=0.2)


def test_a_line_is_interrupted_where_a_peer_was_not_there():
    there, gap = ChartLine(label="a", colour="red", values={1: 1.0, 2: 1.0, 3: 2.0}), {1: 3.0, 3: 1.0}
    svg = line_chart([there, ChartLine(label="b", colour="blue", values=gap)], figure_text)
    assert [len(points.split()) for points in re.findall(r'points="([^"]*)"', svg)] == [3, 1, 1]
    assert "round 3, a: 2" in svg
    bridged = line_chart([there, ChartLine(label="b", colour="blue", values=gap)], figure_text, bridged=True)
    assert [len(points.split()) for points in re.findall(r'points="([^"]*)"', bridged)] == [3, 2]


def test_many_peers_become_what_they_range_over():
    lines = [ChartLine(label=f"p{index}", colour="red", values={1: index, 2: 10 * index}) for index in range(21)]
    found = {line.label: line.values for line in spread(lines)}
    assert found == {"greatest": {1: 20, 2: 200}, "median": {1: 10, 2: 100}, "least": {1: 0, 2: 0}}
    assert spread(lines[:4]) == lines[:4]


@pytest.mark.parametrize("values", [(2.3451, 2.3453), (123456.0, 123460.0), (1.0, 1.0 + 1e-9)])
def test_the_labels_of_an_axis_differ(values: tuple[float, float]):
    svg = line_chart([ChartLine(label="p", colour="red", values=dict(enumerate(values)))], figure_text)
    labels = re.findall(r'text-anchor="end">([^<]+)<', svg)
    assert len(labels) > 2 and len(set(labels)) == len(labels)


@pytest.mark.parametrize("values", [(1e308, -1e308), (5e-324, 2e-323), (0.0, 1e-310)])
def test_values_at_the_ends_of_what_numbers_can_be_are_drawn(values: tuple[float, float]):
    svg = line_chart([ChartLine(label="p", colour="red", values=dict(enumerate(values)))], figure_text)
    assert "<polyline" in svg and "nan" not in svg and "inf" not in svg


def test_without_values_the_chart_says_so():
    assert "nothing yet" in line_chart([], figure_text) and "nothing yet" in bar_chart({}, [], bytes_text)


def test_figures_are_short():
    assert [bytes_text(n) for n in (0, 999, 1500, 25_300_000, 4e12)] == ["0 B", "999 B", "1.5 kB", "25 MB", "4 TB"]
    assert [seconds_text(s) for s in (0, 0.02, 1.25, 14, 600, 7200, 3e5)] == [
        "0 s",
        "20 ms",
        "1.2 s",
        "14 s",
        "10 min",
        "2 h",
        "3.5 days",
    ]
    assert [figure_text(v) for v in (0, 2.34567, 0.5, 1e-7, 123456, math.inf)] == [
        "0",
        "2.346",
        "0.5",
        "1.00e-07",
        "1.23e+05",
        "inf",
    ]
