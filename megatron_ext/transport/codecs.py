# SPDX-License-Identifier: Apache-2.0
"""Lossy codecs: tensors as fewer bytes, the same bytes and the same values wherever they are decoded.

What a codec loses is for its caller to keep (error feedback). A non-finite value decodes to a
non-finite one, so that it stays visible.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

__all__ = ["CODEC_NAMES", "BlockCodec", "CastCodec", "Codec", "TopKCodec", "build_codec"]

CODEC_NAMES = ("bf16", "fp16", "fp8", "int8", "int4", "topk")

# Elements that share a scale. The scale is kept as bf16: as wide a range as fp32, 2 bytes.
BLOCK = 128
_SCALE = torch.bfloat16
# Elements among which the largest are chosen; a place in them takes 2 bytes.
CHUNK = 4096


class Codec(Protocol):
    """Turns fp32 values into bytes and back."""

    elementwise: bool
    """Whether every value is coded independently of its neighbours; a decoded value is coded without loss."""

    def nbytes(self, numel: int) -> int:
        """Return the number of bytes of `numel` values."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes, uint8, (nbytes,), of fp32 values, (numel,)."""

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the fp32 values, (numel,), of bytes."""


class CastCodec:
    """Values as 16-bit floating-point numbers."""

    elementwise = True

    def __init__(self, dtype: torch.dtype) -> None:
        """Take the type: bfloat16 or float16."""
        self.dtype = dtype
        self._largest = torch.finfo(dtype).max
        # Of the sum of squares, with room for its rounding.
        self._surely_fits = min((self._largest / 2) ** 2, torch.finfo(torch.float32).max)

    def nbytes(self, numel: int) -> int:
        """Return 2 per value."""
        return 2 * numel

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers' bytes; those that are too large become the largest one."""
        return _bytes(self._rounded(values))

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the numbers."""
        return _typed(data, self.dtype).float()

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers that values of one dimension become; finite ones stay finite."""
        # The cheapest pass tells that none is too large, as they seldom are; a device would have to be waited for.
        if values.device.type == "cpu" and float(values.dot(values)) <= self._surely_fits:
            return values.to(self.dtype)
        within = torch.where(torch.isinf(values), values, values.clamp(-self._largest, self._largest))
        return within.to(self.dtype)


class BlockCodec:
    """Values as small numbers, times one scale per block: integers of 8 or 4 bits, or 8-bit floating point (e4m3)."""

    elementwise = False

    def __init__(self, kind: str) -> None:
        """Take the kind: 'int8', 'int4' or 'fp8'."""
        self._kind = kind
        self._largest = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}[kind]

    def nbytes(self, numel: int) -> int:
        """Return the scales' bytes and the numbers', two 4-bit numbers in a byte."""
        return 2 * _count(numel, BLOCK) + (_count(numel, 2) if self._kind == "int4" else numel)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scales, then the numbers."""
        blocks = _padded(values, BLOCK).view(-1, BLOCK)
        scales = (blocks.abs().amax(dim=1) / self._largest).to(_SCALE)
        # The scale was rounded, so the largest of a block may be a little too large for its number.
        numbers = blocks / torch.where(scales == 0, 1, scales).float()[:, None]
        numbers = numbers.clamp_(-self._largest, self._largest).view(-1)[: values.numel()]
        return torch.cat([_bytes(scales), self._packed(numbers)])

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the numbers times their scales."""
        count = _count(numel, BLOCK)
        scales = _typed(data[: 2 * count], _SCALE).float()
        blocks = _padded(self._unpacked(data[2 * count :], numel), BLOCK).view(-1, BLOCK)
        return (blocks * scales[:, None]).view(-1)[:numel]

    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._kind == "fp8":
            return _bytes(numbers.to(torch.float8_e4m3fn))
        whole = numbers.nan_to_num_(0.0).round_().to(torch.int8)
        if self._kind == "int8":
            return _bytes(whole)
        pairs = _padded(whole, 2).view(-1, 2).view(torch.uint8)
        return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)

    def _unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        if self._kind == "fp8":
            return _typed(data, torch.float8_e4m3fn).float()
        if self._kind == "int8":
            return _typed(data, torch.int8).float()
        # Shifted up and down again, the upper bit of 4 is the sign.
        low, high = (data << 4).view(torch.int8) >> 4, data.view(torch.int8) >> 4
        return torch.stack([low, high], dim=1).view(-1)[:numel].float()


class TopKCodec:
    """The largest values of every chunk, as bf16, with their places; all others are 0."""

    elementwise = False

    def __init__(self, density: float) -> None:
        """Take the fraction of values to keep, in (0, 1]; of every chunk at least one is."""
        self._density = density
        self._cast = CastCodec(torch.bfloat16)

    def nbytes(self, numel: int) -> int:
        """Return 4 per value that is kept."""
        whole, rest = divmod(numel, CHUNK)
        return 4 * (whole * self._kept(CHUNK) + (self._kept(rest) if rest else 0))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return places and values of the whole chunks, then of the rest."""
        return torch.cat([self._encode_rows(rows) for rows in _rows(values)]) if values.numel() else _bytes(values)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the values at their places among zeros."""
        values = torch.zeros(numel, dtype=torch.float32, device=data.device)
        offset = 0
        for rows in _rows(values):
            kept = rows.shape[0] * self._kept(rows.shape[1])
            places = _typed(data[offset : offset + 2 * kept], torch.int16).view(rows.shape[0], -1).long()
            numbers = self._cast.decode(data[offset + 2 * kept : offset + 4 * kept], kept)
            rows.scatter_(1, places, numbers.view(rows.shape[0], -1))
            offset += 4 * kept
        return values

    def _encode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        # What is not a number counts as the largest of all, so that it is sent.
        size = rows.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        # A stable sort, not topk: which of several equal values is chosen must not differ between ranks.
        order = size.sort(dim=1, descending=True, stable=True).indices
        places = order[:, : self._kept(rows.shape[1])].sort(dim=1).values
        numbers = self._cast.encode(rows.gather(1, places).view(-1))
        return torch.cat([_bytes(places.to(torch.int16).view(-1)), numbers])

    def _kept(self, numel: int) -> int:
        return max(1, round(self._density * numel))


def build_codec(name: str, density: float = 1 / 32) -> Codec:
    """Return the codec of a name in `CODEC_NAMES`.

    Args:
        name: which one.
        density: fraction of values that 'topk' keeps.
    """
    if name in ("bf16", "fp16"):
        return CastCodec(torch.bfloat16 if name == "bf16" else torch.float16)
    return TopKCodec(density) if name == "topk" else BlockCodec(name)


def _rows(values: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the whole chunks, (chunks, CHUNK), and of the rest, (1, rest)."""
    whole = values.numel() // CHUNK * CHUNK
    parts = values[:whole].view(-1, CHUNK), values[whole:].view(1, -1)
    return [part for part in parts if part.numel()]


def _padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return 1-D values with zeros up to a multiple of a length."""
    missing = -values.numel() % multiple
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


def _count(numel: int, each: int) -> int:
    return -(-numel // each)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A view of another type must begin at a multiple of its size; bytes in the middle of a message may not.
    aligned = data.data_ptr() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0
    return (data if aligned else data.clone()).view(dtype)
