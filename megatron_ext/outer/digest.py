# SPDX-License-Identifier: Apache-2.0
"""A digest of tensors' bits that is cheap on any device, to check that workers are equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["equal_across", "require_equal", "tensor_digest"]

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


def equal_across(tensors: Iterable[torch.Tensor], group: Any, device: torch.device | None = None) -> bool:
    """Return whether `tensors` are equal, bit for bit as far as the digest sees, on all ranks of `group`."""
    mine = torch.tensor(tensor_digest(tensors), dtype=torch.int64, device=device)
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return bool(torch.equal(lowest, highest))


def require_equal(named: Sequence[tuple[str, torch.Tensor]], group: Any, device: torch.device | None = None) -> None:
    """Check that tensors, given with their names, are equal on all ranks of `group`, which go on from them together.

    Raises:
        RuntimeError: they are not, with the name of the first that differs.
    """
    if equal_across((tensor for _, tensor in named), group, device):
        return
    differs = next(name for name, tensor in named if not equal_across([tensor], group, device))
    raise RuntimeError(
        f"the workers' weights differ where the anchor is to be taken, first in {differs}; they must start equal "
        "(check --data-parallel-random-init and any code of your own that changes weights per rank)"
    )
