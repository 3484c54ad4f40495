# SPDX-License-Identifier: Apache-2.0
"""Delayed Nesterov: an outer optimizer for pseudo-gradients that come one by one (arXiv 2401.09135, algorithm 3).

With every contribution of its own, a momentum would be applied as many times as there are workers, and workers would
spoil each other's steps. So each contribution moves the anchor at once, but the momentum learns from N of them together
and is applied once for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.outer.optimizers.base import OuterOptimizer

__all__ = ["DelayedNesterov"]

_COUNT = "contributions"
_GATHERED = "gathered"
_MOMENTUM = "momentum_buffer"


class DelayedNesterov(OuterOptimizer):
    """Nesterov's momentum that is applied with every N-th pseudo-gradient. A step is of a whole anchor."""

    name = "delayed-nesterov"

    def __init__(self, anchors: Sequence[torch.Tensor], *, lr: float, momentum: float, count: int) -> None:
        """Take what is moved.

        Args:
            anchors: 1-D fp32 tensors.
            lr: outer learning rate.
            momentum: its decay, 0 for none; the paper's beta.
            count: N, how many pseudo-gradients make up one step; each counts 1/N.
        """
        self._anchors = anchors
        self._lr = lr
        self._decay = momentum
        self._count = count
        self._seen = [0] * len(anchors)
        self._gathered = [torch.zeros_like(anchor) for anchor in anchors] if momentum else []
        self._momenta = [torch.zeros_like(anchor) for anchor in anchors] if momentum else []

    def step(self, index: int, part: slice, gradient: torch.Tensor) -> None:
        """Do anchor <- anchor - lr g / N; with the N-th, m <- beta m + (sum of g) / N, anchor <- anchor - lr beta m."""
        anchor = self._anchors[index][part].add_(gradient, alpha=-self._lr / self._count)
        self._seen[index] = (self._seen[index] + 1) % self._count
        if not self._decay:
            return
        gathered = self._gathered[index][part].add_(gradient)
        if self._seen[index] == 0:
            momentum = self._momenta[index][part].mul_(self._decay).add_(gathered, alpha=1 / self._count)
            anchor.add_(momentum, alpha=-self._lr * self._decay)
            gathered.zero_()

    def momentum(self, index: int, part: slice) -> torch.Tensor | None:
        """Return the momentum."""
        return self._momenta[index][part] if self._decay else None

    def states(self, index: int) -> list[torch.Tensor]:
        """Return what was gathered for an anchor, and its momentum."""
        return [self._gathered[index], self._momenta[index]] if self._decay else []

    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Return the momentum, and the sum of the pseudo-gradients that it has not learned from yet."""
        return {_GATHERED: self._gathered, _MOMENTUM: self._momenta} if self._decay else {}

    def scalar_state(self) -> dict[str, float]:
        """Return how many pseudo-gradients there have been since the momentum was applied."""
        return {_COUNT: float(self._seen[0])} if self._seen else {}

    def load(self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, float]) -> None:
        """Take over the states; what is not there starts from rest."""
        self._seen = [int(scalars.get(_COUNT, 0))] * len(self._anchors)
        for name, buffers in ((_GATHERED, self._gathered), (_MOMENTUM, self._momenta)):
            for buffer, loaded in zip(buffers, tensors.get(name, buffers), strict=True):
                buffer.copy_(loaded)
