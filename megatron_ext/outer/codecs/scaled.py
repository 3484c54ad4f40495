# SPDX-License-Identifier: Apache-2.0
"""Values as small numbers times a scale that a block of them shares."""

from __future__ import annotations

import torch

from megatron_ext.outer.codecs.codec import Codec, as_bytes, as_numbers, padded

__all__ = ["BLOCK", "BlockCodec"]

# Elements that share a scale. The scale is kept as bf16: as wide a range as fp32, 2 bytes.
BLOCK = 128
_SCALE = torch.bfloat16


class BlockCodec(Codec):
    """Values as small numbers, times one scale per block: integers of 8 or 4 bits, or 8-bit floating point (e4m3)."""

    grid = BLOCK
    dtype = torch.float32

    def __init__(self, name: str) -> None:
        """Take the kind: 'int8', 'int4' or 'fp8'."""
        self.name = name
        self._largest = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}[name]

    def nbytes(self, numel: int) -> int:
        """Return the scales' bytes and the numbers', two 4-bit numbers in a byte."""
        return 2 * _count(numel, BLOCK) + (_count(numel, 2) if self.name == "int4" else numel)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scales, then the numbers."""
        blocks = padded(values, BLOCK).view(-1, BLOCK)
        scales = (blocks.abs().amax(dim=1) / self._largest).to(_SCALE)
        # The scale was rounded, so the largest of a block may be a little too large for its number.
        numbers = blocks / torch.where(scales == 0, 1, scales).float()[:, None]
        numbers = numbers.clamp_(-self._largest, self._largest).view(-1)[: values.numel()]
        return torch.cat([as_bytes(scales), self._packed(numbers)])

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the numbers times their scales."""
        count = _count(numel, BLOCK)
        scales = as_numbers(data[: 2 * count], _SCALE).float()
        blocks = padded(self._unpacked(data[2 * count :], numel), BLOCK).view(-1, BLOCK)
        return (blocks * scales[:, None]).view(-1)[:numel]

    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.name == "fp8":
            return as_bytes(numbers.to(torch.float8_e4m3fn))
        whole = numbers.nan_to_num_(0.0).round_().to(torch.int8)
        if self.name == "int8":
            return as_bytes(whole)
        pairs = padded(whole, 2).view(-1, 2).view(torch.uint8)
        return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)

    def _unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        if self.name == "fp8":
            return as_numbers(data, torch.float8_e4m3fn).float()
        if self.name == "int8":
            return as_numbers(data, torch.int8).float()
        # Shifted up and down again, the upper bit of 4 is the sign.
        low, high = (data << 4).view(torch.int8) >> 4, data.view(torch.int8) >> 4
        return torch.stack([low, high], dim=1).view(-1)[:numel].float()


def _count(numel: int, each: int) -> int:
    return -(-numel // each)
