# SPDX-License-Identifier: Apache-2.0
"""The digest of a round: the same whoever holds which part, another one after any damage."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.sync_service.protocol.frames import Box, whole_box
from megatron_ext.sync_service.protocol.round_digest import RoundDigest

shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


def values_of(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def digest(values: dict[str, torch.Tensor]) -> str:
    total = RoundDigest()
    for name, value in values.items():
        total.add(name, tuple(value.shape), whole_box(tuple(value.shape)), value)
    return total.hex()


def halves(box: Box, axis: int, size: int) -> tuple[Box, Box]:
    """Cut a box in two along an axis."""
    start, shape = list(box.start), list(box.shape)
    start[axis] += size
    return (
        Box(box.start, (*shape[:axis], size, *shape[axis + 1 :])),
        Box(tuple(start), (*shape[:axis], shape[axis] - size, *shape[axis + 1 :])),
    )


@given(shapes, st.data())
def test_parts_of_any_shape_make_the_digest_of_the_whole(shape: tuple[int, ...], data: st.DataObject):
    boxes = [whole_box(shape)]
    for _ in range(data.draw(st.integers(0, 5))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        axes = [axis for axis, size in enumerate(box.shape) if size > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = data.draw(st.sampled_from(axes))
        boxes += halves(box, axis, data.draw(st.integers(1, box.shape[axis] - 1)))
    values, holders = values_of(shape), [RoundDigest(), RoundDigest()]
    for box in boxes:
        data.draw(st.sampled_from(holders)).add("w", shape, box, values[box.slices])
    assert RoundDigest(holder.sums for holder in holders).hex() == digest({"w": values})


def test_a_range_longer_than_a_row_counts_whole():
    values = values_of((3, 5000))
    parts = RoundDigest()
    for row in range(3):
        parts.add("w", (3, 5000), Box((row, 0), (1, 4999)), values[row, :4999])
        parts.add("w", (3, 5000), Box((row, 4999), (1, 1)), values[row, 4999:])
    assert parts.hex() == digest({"w": values})


@given(st.integers(0, 4999), st.integers(0, 31))
def test_a_single_changed_bit_changes_the_digest(place: int, bit: int):
    values = values_of((5000,))
    damaged = values.clone()
    damaged.view(torch.int32)[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    assert digest({"w": damaged}) != digest({"w": values})


@pytest.mark.parametrize("distance", [1 << power for power in (0, 12, 16, 18)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frames_in_each_others_places_change_the_digest(distance: int, dtype: torch.dtype):
    first, second = torch.randn(2, distance, generator=torch.Generator().manual_seed(1)).to(dtype).float()
    assert digest({"w": torch.cat([first, second])}) != digest({"w": torch.cat([second, first])})


def test_values_in_other_places_change_the_digest():
    a, b = values_of((40,), 1), values_of((40,), 2)
    known = digest({"a": a, "b": b})
    swapped = a.clone()
    swapped[[3, 30]] = swapped[[30, 3]]
    for other in ({"a": b, "b": a}, {"a": swapped, "b": b}, {"a": a.roll(1), "b": b}, {"a": a, "c": b}):
        assert digest(other) != known
    assert digest({"b": b, "a": a}) == known
