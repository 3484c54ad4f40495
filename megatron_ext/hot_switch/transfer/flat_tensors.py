# SPDX-License-Identifier: Apache-2.0
"""Named tensors in one piece of memory that can be given up and taken again."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megatron_ext.hot_switch.transfer.itinerary import LocalTensor

__all__ = ["FlatTensors"]

# Bytes; what GPU kernels and processors' vector units like best.
_ALIGNMENT = 256


class FlatTensors:
    """Tensors that are views of one allocation.

    Attributes:
        views: the tensors by name. They stay the same objects while memory comes and goes.
        nbytes: size of the allocation while there is one.
    """

    def __init__(self, tensors: Mapping[str, LocalTensor], device: torch.device) -> None:
        """Take the memory.

        Args:
            tensors: what each one looks like.
            device: where they live.
        """
        starts, self.nbytes = [], 0
        for local in tensors.values():
            starts.append(self.nbytes)
            size = math.prod(local.shape) * local.dtype.itemsize
            self.nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self.views = {
            name: self._memory[start : start + math.prod(local.shape) * local.dtype.itemsize]
            .view(local.dtype)
            .view(local.shape)
            for start, (name, local) in zip(starts, tensors.items(), strict=True)
        }

    def take(self) -> None:
        """Take the memory again, with undefined contents; does nothing where there is some."""
        # torch would take new memory and copy, also where the size is the same.
        if self._memory.untyped_storage().nbytes() != self.nbytes:
            self._memory.untyped_storage().resize_(self.nbytes)

    def take_zeros(self) -> None:
        """Take the memory again, with zeros in it."""
        self.take()
        self._memory.zero_()

    def give_up(self) -> None:
        """Give the memory up; the views must not be used until it is taken again."""
        self._memory.untyped_storage().resize_(0)
