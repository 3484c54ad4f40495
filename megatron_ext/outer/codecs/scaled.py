# SPDX-License-Identifier: Apache-2.0
"""Values as small numbers times a scale that a block of them shares."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from megatron_ext.outer.codecs.codec import Codec, as_bytes, as_numbers, padded

__all__ = ["BLOCK", "BlockCodec", "Fp8Codec", "Int4Codec", "Int8Codec"]

# Elements that share a scale. The scale is kept as bf16: as wide a range as fp32, 2 bytes.
BLOCK = 128
_SCALE = torch.bfloat16


class BlockCodec(Codec):
    """Values as small numbers, times one scale per block; a subclass says which numbers."""

    grid = BLOCK
    dtype = torch.float32

    largest: ClassVar[float]
    """The largest of the numbers."""

    def nbytes(self, numel: int) -> int:
        """Return the scales' bytes and the numbers'."""
        return 2 * _count(numel, BLOCK) + self._packed_bytes(numel)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scales, then the numbers."""
        blocks = padded(values, BLOCK).view(-1, BLOCK)
        scales = (blocks.abs().amax(dim=1) / self.largest).to(_SCALE)
        # The scale was rounded, so the largest of a block may be a little too large for its number.
        numbers = blocks / torch.where(scales == 0, 1, scales).float()[:, None]
        numbers = numbers.clamp_(-self.largest, self.largest).view(-1)[: values.numel()]
        return torch.cat([as_bytes(scales), self._packed(numbers)])

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the numbers times their scales."""
        count = _count(numel, BLOCK)
        scales = as_numbers(data[: 2 * count], _SCALE).float()
        blocks = padded(self._unpacked(data[2 * count :], numel), BLOCK).view(-1, BLOCK)
        return (blocks * scales[:, None]).view(-1)[:numel]

    def _packed_bytes(self, numel: int) -> int:
        """Return how many bytes numbers take."""
        return numel

    @abstractmethod
    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the bytes of fp32 numbers within the range, which are used up."""

    @abstractmethod
    def _unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the fp32 numbers of bytes."""


class Fp8Codec(BlockCodec):
    """Values as 8-bit floating-point numbers (e4m3), times one scale per block."""

    name = "fp8"
    largest = 448.0

    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        return as_bytes(numbers.to(torch.float8_e4m3fn))

    def _unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        return as_numbers(data, torch.float8_e4m3fn).float()


class Int8Codec(BlockCodec):
    """Values as integers of 8 bits, times one scale per block."""

    name = "int8"
    largest = 127.0

    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        return as_bytes(_whole(numbers))

    def _unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        return as_numbers(data, torch.int8).float()


class Int4Codec(BlockCodec):
    """Values as integers of 4 bits, two of them in a byte, times one scale per block."""

    name = "int4"
    largest = 7.0

    def _packed_bytes(self, numel: int) -> int:
        return _count(numel, 2)

    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        pairs = padded(_whole(numbers), 2).view(-1, 2).view(torch.uint8)
        return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)

    def _unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        # Shifted up and down again, the upper bit of 4 is the sign.
        low, high = (data << 4).view(torch.int8) >> 4, data.view(torch.int8) >> 4
        return torch.stack([low, high], dim=1).view(-1)[:numel].float()


def _whole(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers as integers; what is not a number as 0, since its scale is not one either."""
    return numbers.nan_to_num_(0.0).round_().to(torch.int8)


def _count(numel: int, each: int) -> int:
    return -(-numel // each)
