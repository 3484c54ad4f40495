# SPDX-License-Identifier: Apache-2.0
"""Boxes of a transfer: joined where they are neighbours, cut where they are large, and as views of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_ext.params import Overlap

__all__ = ["Window", "cut_box", "join_boxes", "row_major", "window_of"]

Index = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """A box of a contiguous tensor, by its place in the tensor's memory. All numbers count elements."""

    offset: int
    """First element, from the tensor's first."""

    shape: Index
    """Size of the box."""

    strides: Index
    """Distance between neighbours along each axis: those of the tensor."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_run(self) -> bool:
        """Whether the elements lie in memory one behind the other."""
        # What an axis of one element says about strides means nothing.
        steps = [stride for size, stride in zip(self.shape, self.strides, strict=True) if size > 1]
        return steps == row_major([size for size in self.shape if size > 1])

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the box of `tensor`, sharing its memory."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


def row_major(shape: Iterable[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= size
    return strides[::-1]


def window_of(shape: Index, start: Index, box_shape: Index) -> Window:
    """Return a box of a contiguous tensor.

    Args:
        shape: shape of the tensor.
        start: first element of the box.
        box_shape: size of the box.
    """
    strides = row_major(shape)
    offset = sum(first * stride for first, stride in zip(start, strides, strict=True))
    return Window(offset, box_shape, tuple(strides))


def join_boxes(boxes: Iterable[Overlap]) -> list[Overlap]:
    """Join boxes of one tensor that follow each other along one axis, at the source and at the target alike."""
    found: list[Overlap] = []
    for box in boxes:
        for number, earlier in enumerate(found):
            joined = _joined(earlier, box)
            if joined is not None:
                found[number] = joined
                break
        else:
            found.append(box)
    return found


def cut_box(box: Overlap, limit: int) -> Iterator[Overlap]:
    """Cut a box into boxes of at most `limit` elements, by rows, so that a run of memory becomes runs of memory.

    Args:
        box: the box.
        limit: elements, at least 1.
    """
    numel = math.prod(box.shape)
    if numel <= limit:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    size = box.shape[axis]
    rows = max(1, limit // (numel // size))
    for first in range(0, size, rows):
        part = Overlap(
            _at(box.source_start, axis, box.source_start[axis] + first),
            _at(box.target_start, axis, box.target_start[axis] + first),
            _at(box.shape, axis, min(rows, size - first)),
        )
        yield from cut_box(part, limit)


def _joined(first: Overlap, second: Overlap) -> Overlap | None:
    """The box that two boxes make, if the second one begins where the first one ends."""
    axes = [
        axis
        for axis, places in enumerate(
            zip(first.source_start, second.source_start, first.target_start, second.target_start, strict=True)
        )
        if places[0] != places[1] or places[2] != places[3]
    ]
    if len(axes) != 1:
        return None
    axis = axes[0]
    size = first.shape[axis]
    follows = (
        second.source_start[axis] == first.source_start[axis] + size
        and second.target_start[axis] == first.target_start[axis] + size
    )
    shape = _at(first.shape, axis, size + second.shape[axis])
    if not follows or _at(second.shape, axis, shape[axis]) != shape:
        return None
    return Overlap(first.source_start, first.target_start, shape)


def _at(index: Index, axis: int, value: int) -> Index:
    return (*index[:axis], value, *index[axis + 1 :])
