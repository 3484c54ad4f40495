# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent, and plain averaging, which is its special case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from megatron_ext.outer.optimizers.base import OPTIONS, OuterOptimizer, like
from megatron_ext.outer.optimizers.delayed_nesterov import DelayedNesterov
from megatron_ext.outer.places import Where

__all__ = ["OuterAverage", "OuterSGD"]


class OuterSGD(OuterOptimizer):
    """Stochastic gradient descent with (Nesterov) momentum, in place and element by element.

    The same operations in the same order as `torch.optim.SGD`, bit for bit, but on any range of an anchor: on a
    processor the outer step is bound by memory, and works on what is in the cache.
    """

    name = "sgd"
    options: ClassVar[tuple[str, ...]] = OPTIONS
    default_lr: ClassVar[float | None] = 0.7
    elementwise = True
    refused_in: ClassVar[Mapping[Where, str]] = {}

    def __init__(
        self, anchors: Sequence[torch.Tensor], *, lr: float, momentum: float = 0.0, nesterov: bool = False
    ) -> None:
        self._anchors = anchors
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov
        self._has_buffers = momentum != 0
        self._buffers = [like(anchor).zero_() for anchor in anchors] if momentum else []

    @classmethod
    def of_contributions(cls, anchors: Sequence[torch.Tensor], *, count: int, **options: Any) -> OuterOptimizer:
        """Return delayed Nesterov with the same learning rate and momentum."""
        return DelayedNesterov(anchors, lr=options["lr"], momentum=options["momentum"], count=count)

    def step(self, index: int, part: slice, gradient: torch.Tensor) -> None:
        """Do v <- momentum v + g; anchor <- anchor - lr (g + momentum v), or - lr v without Nesterov."""
        if self._has_buffers:
            buffer = self._buffers[index][part].mul_(self._momentum).add_(gradient)
            gradient = gradient.add_(buffer, alpha=self._momentum) if self._nesterov else buffer
        self._anchors[index][part].add_(gradient, alpha=-self._lr)

    def change(self, options: Mapping[str, float]) -> None:
        """Take another learning rate or momentum; where that is 0 for some rounds, the momentum restarts after them."""
        self._lr = options.get("lr", self._lr)
        self._momentum = options.get("momentum", self._momentum)

    def momentum(self, index: int, part: slice) -> torch.Tensor | None:
        """Return the momentum."""
        return self._buffers[index][part] if self._has_buffers else None

    def states(self, index: int) -> list[torch.Tensor]:
        """Return the momentum of an anchor."""
        return [self._buffers[index]] if self._has_buffers else []

    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Return the momentum under torch's name for it."""
        return {"momentum_buffer": self._buffers} if self._has_buffers else {}

    def load(self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, float]) -> None:
        """Take over the momentum; without one, start from rest."""
        if self._has_buffers and "momentum_buffer" in tensors:
            for buffer, loaded in zip(self._buffers, tensors["momentum_buffer"], strict=True):
                buffer.copy_(loaded)


class OuterAverage(OuterSGD):
    """No outer optimizer: the anchor goes where the workers are in the mean."""

    name = "none"
    options = ()
    default_lr = None
    is_average = True

    def __init__(self, anchors: Sequence[torch.Tensor]) -> None:
        super().__init__(anchors, lr=1.0)

    @classmethod
    def of_contributions(cls, anchors: Sequence[torch.Tensor], *, count: int, **options: Any) -> OuterOptimizer:
        """Return what moves the anchor by a part of each contribution."""
        return DelayedNesterov(anchors, lr=1.0, momentum=0.0, count=count)
