# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ext.params import ParamsError, Split, flat_boxes, flat_offset, global_views, overlaps, put, take
from megatron_ext.params.boxes import cut, whole

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    bounds = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(bounds), draw(bounds)))
    return shape, start, stop


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], Split, int, int]:
    """A shape, a split of it, and two numbers of ranks that can both share it."""
    parts, other_parts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    unit = math.lcm(parts, other_parts)
    blocks = tuple(draw(st.lists(st.integers(0, 2).map(lambda n: n * unit), min_size=1, max_size=3)))
    shape = list(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] = sum(blocks)
    return tuple(shape), Split(axis=axis, blocks=blocks), parts, other_parts


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


@given(flat_ranges())
def test_flat_boxes_are_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = flat_boxes(shape, start, stop)
    content = [
        numbered(shape)[tuple(slice(a, a + n) for a, n in zip(box_start, box_shape, strict=True))].reshape(-1)
        for box_start, box_shape in boxes
    ]
    assert torch.equal(torch.cat([*content, torch.empty(0, dtype=torch.long)]), torch.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@example([(0, 2, 0), (0, 1, 0), (0, 1, 1)])  # a gap that an axis of one element hides
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 2)), max_size=4))
def test_a_flat_offset_is_given_exactly_for_boxes_without_a_gap(axes: list[tuple[int, int, int]]) -> None:
    shape = tuple(before + size + after for before, size, after in axes)
    start, box_shape = tuple(before for before, _, _ in axes), tuple(size for _, size, _ in axes)
    box = numbered(shape)[tuple(slice(a, a + n) for a, n in zip(start, box_shape, strict=True))].reshape(-1)
    first, last = int(box[0]), int(box[-1])
    expected = first if last - first + 1 == box.numel() else None
    assert flat_offset(shape, start, box_shape) == expected


@given(splits())
def test_the_ranks_of_a_split_hold_every_element_exactly_once(
    case: tuple[tuple[int, ...], Split, int, int],
) -> None:
    shape, split, parts, _ = case
    count = torch.zeros(shape, dtype=torch.long)
    for index in range(parts):
        part = cut("x", shape, split, index, parts)
        held = torch.zeros(shape, dtype=torch.long)
        put(torch.ones(part.local_shape, dtype=torch.long), part, held)
        assert int(held.sum()) == part.numel
        count += held
    assert torch.equal(count, torch.ones_like(count))


@given(splits())
def test_each_block_is_cut_by_itself_and_stored_in_block_order(
    case: tuple[tuple[int, ...], Split, int, int],
) -> None:
    shape, split, parts, _ = case
    value = numbered(shape)
    for index in range(parts):
        blocks = value.split(split.blocks, dim=split.axis)
        expected = torch.cat(
            [
                block.chunk(parts, dim=split.axis)[index] if block.shape[split.axis] else block
                for block in blocks
            ],
            dim=split.axis,
        )
        assert torch.equal(take(value, cut("x", shape, split, index, parts)), expected)


@given(splits())
def test_moving_the_overlaps_turns_one_split_into_another(
    case: tuple[tuple[int, ...], Split, int, int],
) -> None:
    shape, split, parts, other_parts = case
    value = numbered(shape)
    sources = [cut("x", shape, split, index, parts) for index in range(parts)]
    local = [take(value, source) for source in sources]
    for index in range(other_parts):
        target = cut("x", shape, split, index, other_parts)
        received = torch.full(target.local_shape, -1)
        moved = 0
        for source, values in zip(sources, local, strict=True):
            for common in overlaps(source, target):
                here = tuple(slice(a, a + n) for a, n in zip(common.target_start, common.shape, strict=True))
                there = tuple(slice(a, a + n) for a, n in zip(common.source_start, common.shape, strict=True))
                received[here] = values[there]
                moved += math.prod(common.shape)
        assert moved == target.numel
        assert torch.equal(received, take(value, target))


@given(splits(), st.data())
def test_the_flat_shards_of_all_ranks_put_the_full_tensor_together(
    case: tuple[tuple[int, ...], Split, int, int], data: st.DataObject
) -> None:
    shape, split, parts, _ = case
    value = numbered(shape)
    out = torch.full(shape, -1)
    for index in range(parts):
        part = cut("x", shape, split, index, parts)
        middle = data.draw(st.integers(0, part.numel))
        flat = take(value, part).reshape(-1)
        for start, stop in ((0, middle), (middle, part.numel)):
            put(flat[start:stop].clone(), part, out, start, stop)
    assert torch.equal(out, value)


def test_global_views_share_memory_with_the_values() -> None:
    part = cut("fc1", (8, 2), Split(axis=0, blocks=(4, 4)), 1, 2)
    shard = torch.zeros(5)
    starts = []
    for start, view in global_views(part, shard, 3, 8):
        starts.append((start, tuple(view.shape)))
        view.fill_(start[0])
    # Gate rows 2, 3 and up rows 6, 7 are local rows 0 to 3; the shard holds local elements 3 to 7.
    assert starts == [((3, 1), (1, 1)), ((6, 0), (2, 2))]
    assert shard.tolist() == [3, 6, 6, 6, 6]


def test_a_block_that_the_ranks_cannot_share_is_refused_by_name() -> None:
    with pytest.raises(ParamsError, match=r"some\.weight.*block of 6 elements.*4 tensor parallel ranks"):
        cut("some.weight", (6, 2), Split(axis=0, blocks=(6,)), 0, 4)


@pytest.mark.parametrize("values", [torch.zeros(3), torch.zeros(4, 2).t()])
def test_values_of_the_wrong_size_or_order_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(ParamsError, match="expected 8 contiguous elements"):
        list(global_views(whole((2, 4)), values))
