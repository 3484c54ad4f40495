# SPDX-License-Identifier: Apache-2.0
"""What a codec is: tensors as fewer bytes, the same bytes and the same values wherever they are decoded.

What a codec loses is for its caller to keep (error feedback). A non-finite value decodes to a non-finite one, so that
it stays visible.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Codec", "as_bytes", "as_numbers", "padded"]


class Codec(Protocol):
    """Turns fp32 values into bytes and back."""

    name: str
    """What it is called where it is asked for: `build_codec` makes it again."""

    grid: int
    """How many elements in a row are coded together, counted from the first one that is given; 1 where every value is
    coded by itself, whatever stands beside it, and what it decodes to is coded without loss."""

    dtype: torch.dtype
    """A type that holds what it decodes to."""

    def for_results(self, messages: int) -> Codec:
        """Return a codec for the mean of this many messages of this one, which loses about as little: itself here."""
        return self

    def nbytes(self, numel: int) -> int:
        """Return the number of bytes of `numel` values."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes, uint8, (nbytes,), of fp32 values, (numel,)."""

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the fp32 values, (numel,), of bytes."""


def padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return 1-D values with zeros up to a multiple of a length."""
    missing = -values.numel() % multiple
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes."""
    return tensor.contiguous().view(torch.uint8)


def as_numbers(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that bytes are."""
    # A view of another type must begin at a multiple of its size; bytes in the middle of a message may not.
    aligned = data.data_ptr() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0
    return (data if aligned else data.clone()).view(dtype)
