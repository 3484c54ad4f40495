# SPDX-License-Identifier: Apache-2.0
"""Every value by itself: as it is, or as a 16-bit floating-point number."""

from __future__ import annotations

import torch

from megatron_ext.outer.codecs.codec import Codec, as_bytes, as_numbers

__all__ = ["Bf16Codec", "CastCodec", "Fp16Codec", "Fp32Codec"]


class Fp32Codec(Codec):
    """Values as they are."""

    name = "fp32"
    grid = 1
    is_cast = True
    dtype = torch.float32

    def nbytes(self, numel: int) -> int:
        """Return 4 per value."""
        return 4 * numel

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values' bytes."""
        return as_bytes(values)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the values."""
        return as_numbers(data, torch.float32)


class CastCodec(Codec):
    """Values as 16-bit floating-point numbers, of the type that a subclass has."""

    grid = 1
    is_cast = True

    def __init__(self) -> None:
        self._largest = torch.finfo(self.dtype).max
        # Of the sum of squares, with room for its rounding.
        self._surely_fits = min((self._largest / 2) ** 2, torch.finfo(torch.float32).max)

    def nbytes(self, numel: int) -> int:
        """Return 2 per value."""
        return 2 * numel

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers' bytes; those that are too large become the largest one."""
        return as_bytes(self._rounded(values))

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the numbers."""
        return as_numbers(data, self.dtype).float()

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers that values of one dimension become; finite ones stay finite."""
        # The cheapest pass tells that none is too large, as they seldom are; a device would have to be waited for.
        if values.device.type == "cpu" and float(values.dot(values)) <= self._surely_fits:
            return values.to(self.dtype)
        within = torch.where(torch.isinf(values), values, values.clamp(-self._largest, self._largest))
        return within.to(self.dtype)


class Bf16Codec(CastCodec):
    """Values as bfloat16: the range of fp32, 8 bits of precision."""

    name = "bf16"
    dtype = torch.bfloat16


class Fp16Codec(CastCodec):
    """Values as float16: up to 65,504, 11 bits of precision."""

    name = "fp16"
    dtype = torch.float16
