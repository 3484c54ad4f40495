# SPDX-License-Identifier: Apache-2.0
"""Which elements have arrived: exactly those of the frames that were taken, at a cost that many small frames do not
multiply.
"""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.sync_service.protocol.frames import Box, Frame, cut
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.values import disjoint_boxes
from megatron_ext.sync_service.values.coverage import Coverage
from megatron_ext.sync_service.values.ranges import Ranges


def frame(shape: Sequence[int], box: Box, offset: int = 0, count: int | None = None) -> Frame:
    """Return a frame of zeros."""
    count = box.numel - offset if count is None else count
    return Frame(
        name="w", shape=tuple(shape), box=box, offset=offset, count=count, codec="fp32", payload=b"", checksum=0
    )


def is_taken(coverage: Coverage, part: Frame) -> bool:
    """Add a frame, and return True, unless it is refused."""
    try:
        coverage.check(part)
    except Refusal as refusal:
        assert "overlaps one that has arrived before" in str(refusal) and part.place in str(refusal)
        return False
    coverage.add(part)
    return True


@pytest.fixture(params=[(512, 256), (3, 2)], ids=["sizes as they are", "packed at once"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few boxes go through all that thousands do."""
    recent, group = request.param
    monkeypatch.setattr(disjoint_boxes, "_RECENT", recent)
    monkeypatch.setattr(disjoint_boxes, "_GROUP", group)


@given(st.data())
def _matches_a_bitmap(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), max_size=4).map(tuple))
    owner = np.zeros(shape, dtype=np.int64)  # which box has an element; 0 for none
    arrived = np.zeros(shape, dtype=bool)
    numbers: dict[Box, int] = {}
    coverage = Coverage()
    for _ in range(data.draw(st.integers(1, 40))):
        if numbers and data.draw(st.booleans()):
            box = data.draw(st.sampled_from(list(numbers)))
        else:
            ranges = [
                sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape
            ]
            box = Box(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))
        offset = data.draw(st.integers(0, box.numel - 1))
        count = data.draw(st.integers(1, box.numel - offset))
        number = numbers.get(box, len(numbers) + 1)
        others = bool(((owner[box.slices] != 0) & (owner[box.slices] != number)).any())
        elements = arrived[box.slices].reshape(-1)
        expected = not others and not elements[offset : offset + count].any()
        assert is_taken(coverage, frame(shape, box, offset, count)) == expected
        if expected:
            numbers[box] = number
            owner[box.slices] = number
            elements = elements.copy()
            elements[offset : offset + count] = True
            arrived[box.slices] = elements.reshape(box.shape)
        assert coverage.covered == arrived.sum() and coverage.boxes == len(numbers)


@pytest.mark.usefixtures("_sizes")
def test_what_is_taken_and_refused_is_what_a_bitmap_says():
    _matches_a_bitmap()


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_thousands_of_boxes_in_any_order_are_covered_exactly_once(axes: int):
    side = {1: 1500, 2: 40, 3: 12}[axes]
    shape = (side,) * axes
    boxes = [Box(corner, (1,) * axes) for corner in itertools.product(range(side), repeat=axes)]
    random.Random(axes).shuffle(boxes)
    coverage = Coverage()
    for box in boxes[:-1]:
        assert is_taken(coverage, frame(shape, box))
    for box in random.Random(0).sample(boxes[:-1], 50):
        assert not is_taken(coverage, frame(shape, box))
        longer = tuple(min(2, side - start) for start in box.start)
        assert longer == box.shape or not is_taken(coverage, frame(shape, Box(box.start, longer)))
    assert not is_taken(coverage, frame(shape, Box((0,) * axes, shape)))
    assert is_taken(coverage, frame(shape, boxes[-1])) and coverage.covered == side**axes


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=80), st.sampled_from([2, 1024]))
def test_ranges_are_joined_and_none_is_taken_twice(parts: list[tuple[int, int]], most: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_ext.sync_service.values.ranges._MOST", most)
        ranges, taken = Ranges(), set[int]()
        for begin, count in parts:
            numbers = set(range(begin, begin + count))
            assert ranges.touches(begin, begin + count) == bool(numbers & taken)
            if not numbers & taken:
                ranges.add(begin, begin + count)
                taken |= numbers
            for end in (1, 20, 69):
                assert ranges.covers(end) == taken.issuperset(range(end))


def points(count: int) -> tuple[tuple[int, ...], list[Box]]:
    side = round(count**0.5)
    return (side, side), [Box(corner, (1, 1)) for corner in itertools.product(range(side), repeat=2)]


def crossing(count: int) -> tuple[tuple[int, ...], list[Box]]:
    """Long rows beside long columns, and points between the rows."""
    n = count // 3
    rows = [Box((2 * at, 0), (1, 2 * n)) for at in range(n)]
    spots = [Box((2 * at + 1, at), (1, 1)) for at in range(n)]
    columns = [Box((0, 2 * n + at), (2 * n, 1)) for at in range(n)]
    return (2 * n, 3 * n), rows + spots + columns


@pytest.mark.parametrize("layout", [points, crossing])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_eight_times_as_many_boxes_are_compared_far_less_than_sixty_four_times_as_often(
    layout, is_shuffled: bool, monkeypatch: pytest.MonkeyPatch
):
    compared = 0
    overlapping = disjoint_boxes._overlapping

    def counted(lower, upper, low, high):
        nonlocal compared
        compared += lower[0].size
        return overlapping(lower, upper, low, high)

    monkeypatch.setattr(disjoint_boxes, "_overlapping", counted)
    totals = []
    for count in (1500, 12000):
        compared = 0
        shape, boxes = layout(count)
        if is_shuffled:
            random.Random(7).shuffle(boxes)
        coverage = Coverage()
        for box in boxes:
            coverage.check(frame(shape, box))
            coverage.add(frame(shape, box))
        totals.append(compared)
    assert totals[1] < 24 * totals[0], totals


def test_columns_of_a_tensor_are_a_few_comparisons(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disjoint_boxes._Pack, "of", lambda *_: pytest.fail("eight boxes were packed"))
    shape, coverage = (4096, 11008), Coverage()
    for column in range(8):
        box = Box((0, 1376 * column), (4096, 1376))
        for offset, count in cut(box.numel, 1 << 20):
            assert is_taken(coverage, frame(shape, box, offset, count))
    assert coverage.covered == 4096 * 11008
