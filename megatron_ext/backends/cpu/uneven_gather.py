# SPDX-License-Identifier: Apache-2.0
"""Gathering tensors of unequal sizes, which NCCL does and gloo refuses.

The layer-wise optimizer (Muon over several replicas) gives whole parameters to ranks and gathers them so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ext.backends.cpu.device_placement import TORCH_VERSIONS
from megatron_ext.patching import Patch

__all__ = ["patches"]


def patches() -> tuple[Patch, ...]:
    """Return the records of this module, always the same objects."""
    return _PATCHES


class _Pending:
    """The handle of a gather whose results have to be copied out of tensors of one size."""

    def __init__(self, handle: Any, copy_out: Callable[[], None]) -> None:
        self._handle = handle
        self._copy_out = copy_out

    def wait(self, *args: Any) -> bool:
        """Wait for the results."""
        done = bool(self._handle.wait(*args))
        self._copy_out()
        return done


def _of_any_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        longest = max((part.numel() for part in tensor_list), default=0)
        if all(part.numel() == longest for part in tensor_list):
            return original(tensor_list, tensor, group, async_op)
        padded = [tensor.new_empty(longest) for _ in tensor_list]
        own = tensor.new_zeros(longest)
        own[: tensor.numel()] = tensor.reshape(-1)

        def copy_out() -> None:
            for part, found in zip(tensor_list, padded, strict=True):
                part.copy_(found[: part.numel()].view(part.shape))

        handle = original(padded, own, group, async_op)
        if handle is not None:  # None where this rank is not of the group, or has the results already
            return _Pending(handle, copy_out)
        copy_out()
        return None

    return all_gather


_PATCHES = (
    Patch(
        name="cpu/uneven-gather",
        target="torch.distributed:all_gather",
        wrap=_of_any_sizes,
        parameters=("tensor_list", "tensor", "group", "async_op"),
        rebind=False,
        reason="gloo gathers tensors of one size, and the layer-wise optimizer has as many parameters on each rank as "
        "it happens.",
        versions=TORCH_VERSIONS,
        distribution="torch",
    ),
)
