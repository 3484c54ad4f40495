# SPDX-License-Identifier: Apache-2.0
"""The guests' losses and token counts, which other ranks than home's last stage know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.hot_switch.runtime.loss_checks import require_names
from megatron_ext.hot_switch.runtime.prediction_losses import PredictionReport
from megatron_ext.hot_switch.runtime.router_losses import RouterReport

__all__ = ["GuestLosses"]


class GuestLosses:
    """Adds up over micro-batches, guests and ranks. One small all-reduce per step."""

    def __init__(self, device: torch.device, group: Any, *reports: RouterReport | PredictionReport) -> None:
        """Start with nothing.

        Args:
            device: of the losses.
            group: process group of the ranks to add up over.
            reports: of other losses of the guests; their `sums` are added up along.
        """
        self._device = device
        self._group = group
        self._reports = reports
        self._names: tuple[str, ...] | None = None
        self.start()

    def start(self) -> None:
        """Forget the last step."""
        # fp64, in which a number of tokens is exact.
        self._tokens = torch.zeros((), dtype=torch.float64, device=self._device)
        self._mine: dict[str, torch.Tensor] = {}

    def add(self, losses: Sequence[Mapping[str, torch.Tensor]], tokens: torch.Tensor) -> None:
        """Count a guest's micro-batches on a rank that reports them.

        Args:
            losses: for each micro-batch pairs of (sum, number of tokens) by name.
            tokens: predicted tokens.
        """
        self._tokens += tokens.to(self._device)
        for loss in losses:
            for name, pair in loss.items():
                value = pair.detach().to(torch.float64).view(2)
                self._mine[name] = self._mine[name] + value if name in self._mine else value

    def finish(self) -> None:
        """Add up over the ranks of the group, which must all call it.

        Raises:
            UserError: the names of the losses changed during the run.
        """
        if self._names is None:
            everyone: list[tuple[str, ...]] = [()] * dist.get_world_size(self._group)
            dist.all_gather_object(everyone, tuple(sorted(self._mine)), group=self._group)
            self._names = max(everyone, key=len)
        if self._mine:
            require_names(self._mine, self._names)
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        pairs = [self._mine.get(name, nothing) for name in self._names]
        others = [report.sums for report in self._reports]
        together = torch.cat([self._tokens.view(1), *pairs, *(sums.flatten() for sums in others)])
        dist.all_reduce(together, group=self._group)
        self._tokens = together[0]
        self._mine = dict(zip(self._names, together[1 : 1 + 2 * len(pairs)].view(-1, 2), strict=True))
        found = torch.split(together[1 + 2 * len(pairs) :], [sums.numel() for sums in others])
        for sums, values in zip(others, found, strict=True):
            sums.copy_(values.view_as(sums))

    @property
    def tokens(self) -> torch.Tensor:
        """Predicted tokens of all guests, after `finish`; a scalar."""
        return self._tokens

    def for_home(self, like: Mapping[str, torch.Tensor], *, counts: bool) -> dict[str, torch.Tensor]:
        """Return the sums as the losses of one more micro-batch of home.

        Args:
            like: the losses of one of home's micro-batches.
            counts: whether this rank adds them; the sum over home's replicas must have them once.

        Raises:
            UserError: they have other names.
        """
        require_names(like, self._mine)
        factor = 1.0 if counts else 0.0
        return {name: (self._mine[name] * factor).to(value.dtype).view_as(value) for name, value in like.items()}
