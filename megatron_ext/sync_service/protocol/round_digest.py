# SPDX-License-Identifier: Apache-2.0
"""The digest of a round: a checksum of all values that processes can put together which hold parts of them alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from megatron_ext.params import flat_offset
from megatron_ext.sync_service.protocol.frames import Box

__all__ = ["RoundDigest"]

_MODULUS = 1 << 32
_ROW = 4096
"""Elements of a row into which a range without gaps is cut, so that sums by row and by column stay small."""

_TOGETHER = 1 << 16
"""Elements that are added at a time."""


class RoundDigest:
    """Two sums modulo 2^32 over the elements of all tensors.

    The first adds up an element's 32 bits, whose lower half is the exclusive or of both: values that are bf16 have
    nothing in it, which would leave half of the sums. The second adds up these bits times the element's position
    in its tensor, from 1; both times an odd number that is the SHA-256 of the tensor's name. So neither the order in
    which elements are added nor what else is added together with them matters, and what a disk or a network does to
    values all but surely changes the sums. They do not protect from an attacker who wants equal sums.
    """

    def __init__(self, sums: Iterable[tuple[int, int]] = ()) -> None:
        """Begin with what other digests have added, as their `sums` say."""
        self.sums = (0, 0)
        for plain, placed in sums:
            self._add(1, plain, placed)

    def add(self, name: str, shape: tuple[int, ...], box: Box, values: torch.Tensor) -> None:
        """Add a part of a tensor.

        Args:
            name: of the tensor.
            shape: of the tensor.
            box: which elements of it.
            values: of the box, fp32 on the CPU, in its row-major order.
        """
        first = flat_offset(shape, box.start, box.shape)
        if first is None:
            rows = _bits(values).reshape(-1, box.shape[-1])
            self._add_rows(_factor(name), rows, _first_positions(shape, box))
        else:
            self.add_range(name, first, values)

    def add_range(self, name: str, first: int, values: torch.Tensor) -> None:
        """Add elements of a tensor that follow each other in its row-major order, from the first one on."""
        factor, bits = _factor(name), _bits(values)
        whole = bits.size // _ROW * _ROW
        for at, rows in ((0, bits[:whole].reshape(-1, _ROW)), (whole, bits[whole:].reshape(1, -1))):
            starts = np.arange(len(rows), dtype=np.uint64) * np.uint64(_ROW) + np.uint64(first + at)
            self._add_rows(factor, rows, starts)

    def hex(self) -> str:
        """Return the digest of what was added."""
        return "".join(f"{number:08x}" for number in self.sums)

    def _add_rows(self, factor: int, bits: Any, first: Any) -> None:
        """Add rows of elements that lie side by side; `first` is the position of the first one of each, from 0."""
        # As many at a time as stay in a processor's cache.
        count, width = max(1, _TOGETHER // max(1, bits.shape[1])), bits.shape[1]
        memory, places = np.empty((min(count, len(bits)), width), np.uint32), np.arange(1, width + 1, dtype=np.uint64)
        for at in range(0, len(bits), count):
            part = bits[at : at + count]
            folded = np.right_shift(part, 16, out=memory[: len(part)])
            folded ^= part
            # In 32 bits, which overflow as they should, a processor adds four times as fast as in 64.
            rows, columns = (folded.sum(axis=axis, dtype=np.uint32).astype(np.uint64) for axis in (1, 0))
            placed = int(np.dot(first[at : at + count], rows)) + int(np.dot(places, columns))
            self._add(factor, int(rows.sum(dtype=np.uint64)), placed)

    def _add(self, factor: int, plain: int, placed: int) -> None:
        self.sums = ((self.sums[0] + factor * plain) % _MODULUS, (self.sums[1] + factor * placed) % _MODULUS)


def _factor(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") | 1


def _bits(values: torch.Tensor) -> Any:
    return values.detach().contiguous().view(-1).numpy().view(np.uint32)


def _first_positions(shape: tuple[int, ...], box: Box) -> Any:
    """Return the position in its tensor of the first element of every row of a box, from 0."""
    found = np.array([box.start[-1]], dtype=np.uint64)
    for axis in range(len(shape) - 1):
        stride = math.prod(shape[axis + 1 :])
        steps = np.arange(box.start[axis], box.start[axis] + box.shape[axis], dtype=np.uint64) * np.uint64(stride)
        found = (found[:, None] + steps[None, :]).reshape(-1)
    return found
