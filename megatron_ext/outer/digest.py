# SPDX-License-Identifier: Apache-2.0
"""A digest of tensors' bits that is cheap on any device, to check that workers are equal."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["tensor_digest"]

# Positions are weighted modulo a prime, so that swapped or shifted values change the digest.
_PRIME = 65521
_CHUNK = 1 << 22


def tensor_digest(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Return two 62-bit sums over the bit patterns of `tensors`, the second one weighted by position."""
    plain, weighted = 0, 0
    for tensor in tensors:
        bits = _words(tensor.detach().reshape(-1))
        for start in range(0, bits.numel(), _CHUNK):
            sums = _sums(bits[start : start + _CHUNK].to(torch.int64), start)
            plain += sums[0]
            weighted += sums[1]
    mask = (1 << 62) - 1
    return plain & mask, weighted & mask


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return the bits of a 1-D tensor as integers."""
    if flat.dtype is torch.complex128:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def _sums(chunk: torch.Tensor, start: int) -> tuple[int, int]:
    """Return the sums over a chunk, which is used up: on a GPU memory is scarce, and its copy is twice its size."""
    plain = int(chunk.sum())
    weights = torch.arange(start, start + chunk.numel(), device=chunk.device).remainder_(_PRIME).add_(1)
    return plain, int(chunk.mul_(weights).sum())
