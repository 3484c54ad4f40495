# SPDX-License-Identifier: Apache-2.0
"""Invariant 7: every element is synchronised exactly once for any sizes, any units and any segment size."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.local_sgd.exchange.segments import plan_segments

# Runs of tensors, each run of one unit, as the tensors of a model are.
MODELS = st.lists(st.lists(st.integers(min_value=0, max_value=300), max_size=8), max_size=8).map(
    lambda units: [(size, unit) for unit, sizes in enumerate(units) for size in sizes]
)
LIMITS = st.integers(min_value=1, max_value=400)
SMALL = st.integers(min_value=0, max_value=100)


def elements(pieces):
    return [(piece.index, at) for piece in pieces for at in range(piece.start, piece.stop)]


def plan(model, limit, small):
    return plan_segments([size for size, _ in model], [unit for _, unit in model], limit, small)


@given(MODELS, LIMITS, SMALL)
def test_every_element_occurs_exactly_once(model, limit, small):
    found = [
        element
        for segment in plan(model, limit, small)
        for element in elements((*segment.pieces, *segment.small))
    ]
    assert sorted(found) == [(index, at) for index, (size, _) in enumerate(model) for at in range(size)]


@given(MODELS, LIMITS, SMALL)
def test_no_segment_exceeds_the_limit_is_empty_or_mixes_units(model, limit, small):
    for segment in plan(model, limit, small):
        pieces = (*segment.pieces, *segment.small)
        assert 1 <= segment.numel <= limit
        assert {model[piece.index][1] for piece in pieces} == {segment.unit}
        assert all(piece.numel >= 1 for piece in pieces)
        assert all(model[piece.index][0] >= small for piece in segment.pieces)
        assert all(model[piece.index][0] < small for piece in segment.small)


@given(MODELS, LIMITS, SMALL, st.data())
def test_a_range_of_a_segment_is_made_of_its_pieces_and_its_runs(model, limit, small, data):
    for segment in plan(model, limit, small):
        start = data.draw(st.integers(0, segment.numel))
        stop = data.draw(st.integers(start, segment.numel))
        expected = elements((*segment.pieces, *segment.small))[start:stop]
        assert elements(segment.within(start, stop)) == expected
        runs = list(segment.runs(start, stop))
        assert [element for run in runs for element in elements(run.pieces)] == expected
        assert [run.start for run in runs] == [sum(run.numel for run in runs[:number]) for number in range(len(runs))]


def test_the_case_that_loses_tensors_elsewhere():
    # Sizes 3 and 3 under a limit of 4: an offset that advances by the limit instead of the size drops the second.
    segments = plan_segments([3, 3], [0, 0], limit=4, small=1)
    assert [element for segment in segments for element in elements(segment.pieces)] == [
        (index, at) for index in (0, 1) for at in range(3)
    ]


def test_a_unit_is_cut_evenly_with_its_small_tensors_in_one_copy_at_the_end():
    segments = plan_segments([2, 90, 5, 110, 7], [0, 0, 0, 0, 1], limit=70, small=10)
    assert [
        [[(piece.index, piece.numel) for piece in pieces] for pieces in (segment.pieces, segment.small)]
        for segment in segments
    ] == [
        [[(1, 69)], []],
        [[(1, 21), (3, 48)], []],
        [[(3, 62)], [(0, 2), (2, 5)]],
        [[], [(4, 7)]],
    ]
