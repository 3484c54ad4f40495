# SPDX-License-Identifier: Apache-2.0
"""Boxes: which part of a global tensor a rank holds, and where it lies in the rank's local tensor.

All coordinates are element offsets; a box is a start and a shape, one number per axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_ext.params.tensors import GlobalTensor, ParamsError, Split

Index = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box that exists twice: in the global tensor and, at another place, in a local one."""

    global_start: Index
    """First element of the box in the global tensor."""

    local_start: Index
    """First element of the box in the local tensor."""

    shape: Index
    """Size of the box, the same on both sides."""

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slice:
    """What one rank holds of one global tensor. The pieces tile the local tensor exactly."""

    local_shape: Index
    """Shape of the local tensor."""

    pieces: tuple[Piece, ...]
    """Where the local tensor's parts come from, in the order of the local tensor."""

    @property
    def numel(self) -> int:
        """Number of elements of the local tensor."""
        return math.prod(self.local_shape)


@dataclass(frozen=True)
class Overlap:
    """A box that two slices of one tensor both hold: what a transfer between their ranks would move."""

    source_start: Index
    """First element in the source's local tensor."""

    target_start: Index
    """First element in the target's local tensor."""

    shape: Index
    """Size of the box."""


def whole(shape: Index) -> Slice:
    """The slice of a rank that holds the whole tensor."""
    origin = (0,) * len(shape)
    return Slice(shape, (Piece(origin, origin, shape),))


def cut(name: str, shape: Index, split: Split, index: int, parts: int) -> Slice:
    """The slice of rank ``index`` when ``parts`` ranks share a tensor.

    Args:
        name: the tensor's name, for the error message.
        shape: global shape.
        split: axis and blocks.
        index: the rank's place among the ``parts`` ranks, from 0.
        parts: number of ranks that share the tensor.

    Raises:
        ParamsError: when a block cannot be cut into equal parts.
    """
    local_size = 0
    global_offset = 0
    pieces = []
    for block in split.blocks:
        if block % parts:
            raise ParamsError(
                f"{name}: axis {split.axis} has a block of {block} elements, which "
                f"{parts} tensor parallel ranks cannot share evenly"
            )
        part = block // parts
        piece_shape = _replaced(shape, split.axis, part)
        pieces.append(
            Piece(
                _replaced((0,) * len(shape), split.axis, global_offset + index * part),
                _replaced((0,) * len(shape), split.axis, local_size),
                piece_shape,
            )
        )
        local_size += part
        global_offset += block
    return Slice(_replaced(shape, split.axis, local_size), tuple(pieces))


def slice_of(tensor: GlobalTensor, index: int, parts: int) -> Slice:
    """The slice of ``tensor`` on rank ``index`` of its ``parts`` tensor parallel ranks."""
    if tensor.split is None or parts == 1:
        return whole(tensor.shape)
    return cut(tensor.name, tensor.shape, tensor.split, index, parts)


def overlaps(source: Slice, target: Slice) -> list[Overlap]:
    """The boxes that two slices of the same global tensor have in common, in the target's order."""
    found = []
    for wanted in target.pieces:
        for held in source.pieces:
            start = tuple(map(max, wanted.global_start, held.global_start))
            stop = tuple(
                map(min, _stop(wanted.global_start, wanted.shape), _stop(held.global_start, held.shape))
            )
            shape = tuple(b - a for a, b in zip(start, stop, strict=True))
            if min(shape, default=1) > 0:
                found.append(
                    Overlap(
                        _moved(held.local_start, held.global_start, start),
                        _moved(wanted.local_start, wanted.global_start, start),
                        shape,
                    )
                )
    return found


def flat_offset(shape: Index, start: Index, box_shape: Index) -> int | None:
    """Where a box begins in the flattened (row-major) tensor, if its elements lie there without a gap.

    Args:
        shape: shape of the tensor.
        start: first element of the box.
        box_shape: size of the box, at least one element.

    Returns:
        The offset of the box' first element, or None when other elements lie between its own.
    """
    offset = 0
    is_full = True  # whether the box spans all axes behind this one
    for axis in reversed(range(len(shape))):
        if box_shape[axis] > 1 and not is_full:
            return None
        is_full = is_full and box_shape[axis] == shape[axis]
        offset += start[axis] * math.prod(shape[axis + 1 :])
    return offset


def flat_boxes(shape: Index, start: int, stop: int) -> list[tuple[Index, Index]]:
    """Cut a range of a flattened (row-major) tensor into boxes.

    Args:
        shape: shape of the tensor.
        start: first element of the range in the flattened tensor.
        stop: one past its last element.

    Returns:
        ``(box start, box shape)`` pairs in flat order, at most ``2 * len(shape) - 1`` of them; each box is
        contiguous in the flattened tensor.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,)) if shape else ((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        inner = flat_boxes(shape[1:], start - first * row, stop - first * row)
        return [((first, *box_start), (1, *box_shape)) for box_start, box_shape in inner]
    boxes = []
    if start % row:
        boxes += flat_boxes(shape, start, (first + 1) * row)
        first += 1
    full_rows = stop // row - first
    if full_rows:
        boxes.append(((first,) + (0,) * (len(shape) - 1), (full_rows, *shape[1:])))
    if stop % row:
        boxes += flat_boxes(shape, last * row, stop)
    return boxes


def global_views(
    part: Slice, values: torch.Tensor, start: int = 0, stop: int | None = None
) -> Iterator[tuple[Index, torch.Tensor]]:
    """Walk local values in global coordinates.

    Args:
        part: which part of the global tensor the local tensor is.
        values: the local tensor, or any tensor that holds the elements ``start`` to ``stop`` of the
            flattened local tensor (a distributed optimizer's shard). Must be contiguous.
        start: first element held by ``values``.
        stop: one past the last; None for the end of the local tensor.

    Yields:
        ``(global start, view)``: the view shares memory with ``values``, so the walk serves reading and
        writing. All views together are every element of ``values`` exactly once.

    Raises:
        ParamsError: when ``values`` does not have ``stop - start`` elements or is not contiguous.
    """
    stop = part.numel if stop is None else stop
    if values.numel() != stop - start or not values.is_contiguous():
        raise ParamsError(
            f"expected {stop - start} contiguous elements (range {start}:{stop} of a local "
            f"tensor of shape {part.local_shape}), got shape {tuple(values.shape)}"
        )
    flat = values.reshape(-1)
    position = 0
    for box_start, box_shape in flat_boxes(part.local_shape, start, stop):
        size = math.prod(box_shape)
        box = flat[position : position + size].view(box_shape)
        position += size
        here = Slice(box_shape, (Piece(box_start, (0,) * len(box_shape), box_shape),))
        there = Slice(
            part.local_shape,
            tuple(Piece(piece.local_start, piece.global_start, piece.shape) for piece in part.pieces),
        )
        for common in overlaps(there, here):
            yield common.source_start, _box_view(box, common.target_start, common.shape)


def take(value: torch.Tensor, part: Slice) -> torch.Tensor:
    """Copy a rank's part out of a full value.

    Args:
        value: full value in the tensor's global shape.
        part: the rank's slice.

    Returns:
        A new contiguous tensor of shape ``part.local_shape``.
    """
    local = torch.empty(part.local_shape, dtype=value.dtype, device=value.device)
    for start, view in global_views(part, local):
        view.copy_(_box_view(value, start, tuple(view.shape)))
    return local


def put(
    values: torch.Tensor, part: Slice, out: torch.Tensor, start: int = 0, stop: int | None = None
) -> None:
    """Copy a rank's values to their places in a full tensor; the inverse of ``take``.

    Args:
        values: the local tensor, or the elements ``start`` to ``stop`` of it, flattened.
        part: the rank's slice.
        out: full tensor in the global shape, changed in place.
        start: first element of the flattened local tensor that ``values`` holds.
        stop: one past the last; None for the end.
    """
    for global_start, view in global_views(part, values, start, stop):
        _box_view(out, global_start, tuple(view.shape)).copy_(view)


def _replaced(index: Index, axis: int, value: int) -> Index:
    return (*index[:axis], value, *index[axis + 1 :])


def _stop(start: Index, shape: Index) -> Index:
    return tuple(a + b for a, b in zip(start, shape, strict=True))


def _moved(local_start: Index, global_start: Index, target: Index) -> Index:
    return tuple(a + t - g for a, g, t in zip(local_start, global_start, target, strict=True))


def _box_view(value: torch.Tensor, start: Index, shape: Index) -> torch.Tensor:
    for axis, (first, size) in enumerate(zip(start, shape, strict=True)):
        value = value.narrow(axis, first, size)
    return value
