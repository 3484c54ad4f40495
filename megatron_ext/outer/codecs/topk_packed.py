# SPDX-License-Identifier: Apache-2.0
"""The largest values alone, in 2 bits each, with places of as few bits as a chunk needs."""

from __future__ import annotations

import torch

from megatron_ext.outer.codecs.codec import as_numbers
from megatron_ext.outer.codecs.topk import CHUNK, TopKCodec

__all__ = ["TopKPackedCodec"]

FEWEST = 16
"""Values that are kept of a chunk at least, or all of a shorter one: with fewer, its magnitudes would cost too much."""

_LEVELS = 1 << 20
"""Steps of the largest value in which magnitudes are added up: whole numbers have the same sum in any order."""


class TopKPackedCodec(TopKCodec):
    """The largest values of every chunk, in at most 2 bytes each: a place in 12 bits, a value in 2.

    Of a value there is its sign, and whether it is one of the larger ones of those that its chunk keeps; either kind
    has a magnitude, the mean of its own, as bf16. A chunk of fewer values than 4096, as at a tensor's end, has shorter
    places; two magnitudes alone take more than 2 bytes a value where a tensor has one value or two.
    """

    name = "topk2"
    smallest_density = FEWEST / CHUNK

    def _kept(self, numel: int) -> int:
        return max(min(FEWEST, numel), super()._kept(numel))

    def _row_bytes(self, length: int) -> int:
        """Return two magnitudes' bytes and those of places and values."""
        return 4 + _packed_bytes(self._kept(length), _width(length) + 2)

    def _encode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        places = self._places(rows)
        numbers = rows.gather(1, places)
        larger, magnitudes = _magnitudes(numbers.abs())
        width = _width(rows.shape[1])
        fields = places | (numbers < 0).long() << width | larger.long() << (width + 1)
        scales = self._cast.encode(magnitudes.view(-1)).view(rows.shape[0], 4)
        return torch.cat([scales, _packed(fields, width + 2)], dim=1).view(-1)

    def _decode_rows(self, data: torch.Tensor, chunks: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = data.view(chunks, -1)
        width = _width(length)
        magnitudes = as_numbers(table[:, :4].reshape(-1), self._cast.dtype).float().view(chunks, 2)
        fields = _unpacked(table[:, 4:], self._kept(length), width + 2)
        numbers = magnitudes.gather(1, fields >> (width + 1))
        return fields & ((1 << width) - 1), torch.where((fields >> width & 1).bool(), -numbers, numbers)


def _width(length: int) -> int:
    """Return the bits of a place among this many."""
    return (length - 1).bit_length()


def _magnitudes(size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of each row's sizes are above its mean, and the means of those below and above, (rows, 2).

    A row with a non-finite size has non-finite means.
    """
    largest = size.amax(dim=1, keepdim=True)
    steps = (size / torch.where(largest == 0, 1, largest)).nan_to_num(0.0, 0.0).mul(_LEVELS).round().long()
    larger = steps * size.shape[1] > steps.sum(dim=1, keepdim=True)
    above = _mean(steps, larger)
    return larger, torch.cat([_mean(steps, ~larger), above], dim=1) / _LEVELS * largest


def _mean(steps: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return each row's fp32 mean of the chosen, (rows, 1); 0 where there are none."""
    count = chosen.sum(dim=1, keepdim=True).clamp(min=1)
    # The quotient in fp64, which holds the sums exactly.
    return ((steps * chosen).sum(dim=1, keepdim=True).double() / count).float()


def _packed_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _packed(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Return whole numbers, (rows, count), each of some bits, as bytes, (rows, bytes), lowest bits first."""
    rows, count = fields.shape
    single = fields.new_zeros((rows, 8 * _packed_bytes(count, bits)), dtype=torch.uint8)
    within = single[:, : count * bits].view(rows, count, bits)
    for bit in range(bits):
        within[:, :, bit] = fields >> bit & 1
    data = single.new_zeros((rows, single.shape[1] // 8))
    for bit in range(8):
        data |= single[:, bit::8] << bit
    return data


def _unpacked(data: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Return the whole numbers, int64, (rows, count), each of some bits, in bytes, (rows, bytes)."""
    rows = data.shape[0]
    single = data.new_empty((rows, 8 * data.shape[1]))
    for bit in range(8):
        single[:, bit::8] = data >> bit & 1
    within = single[:, : count * bits].view(rows, count, bits)
    fields = data.new_zeros((rows, count), dtype=torch.int64)
    for bit in range(bits):
        fields |= within[:, :, bit].long() << bit
    return fields
