# SPDX-License-Identifier: Apache-2.0
"""What a codec is: tensors as fewer bytes, the same bytes and the same values wherever they are decoded.

What a codec loses is for its caller to keep (error feedback). A non-finite value decodes to a non-finite one, so that
it stays visible.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import torch

from megatron_ext.outer.places import Where

__all__ = ["LARGEST_GRID", "Codec", "as_bytes", "as_numbers", "padded"]

LARGEST_GRID = 1 << 20
"""Elements that a server takes together, in one frame."""


class Codec(ABC):
    """Turns fp32 values into bytes and back. It has no state: what it makes of values depends on these alone."""

    name: str
    """What it is called where it is asked for: `build_codec` makes it again. Of a class that takes a density, an
    object's name has the density behind it, as in 'topk:0.125'."""

    grid: int
    """How many elements in a row are coded together, counted from the first one that is given; 1 where every value is
    coded by itself, whatever stands beside it, and what it decodes to, and the opposite of that, without loss."""

    dtype: torch.dtype
    """A type that holds what it decodes to."""

    is_cast: ClassVar[bool] = False
    """Whether the bytes are the numbers of `dtype` as memory has them, so that what is kept as these is coded already.
    """

    takes_density: ClassVar[bool] = False
    """Whether it is made with the fraction of the values that it keeps, in (0, 1], or without for its own default."""

    smallest_density: ClassVar[float] = 0.0
    """Of a class that takes a density: the smallest one that may be asked for; with 0 any above it."""

    refused_in: ClassVar[Mapping[Where, str]] = {}
    """The places where it does not work, each with the reason; without any it works everywhere."""

    def for_results(self, messages: int) -> Self:
        """Return a codec for the mean of this many messages of this one, which loses about as little: itself here."""
        return self

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the number of bytes of `numel` values."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes, uint8, (nbytes,), of fp32 values, (numel,), which stay as they are."""

    @abstractmethod
    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the fp32 values, (numel,), of bytes, which may begin anywhere in their memory."""


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
