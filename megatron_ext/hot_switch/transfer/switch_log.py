# SPDX-License-Identifier: Apache-2.0
"""What the switches of a training step moved, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron_ext.hot_switch.planning.figures import SwitchFigures, measure_plan
from megatron_ext.hot_switch.planning.plan import SwitchPlan

__all__ = ["DoneSwitch", "SwitchLog"]

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class DoneSwitch:
    """One switch of a step."""

    title: str
    """What went where, such as `gradients 1,2,1 -> home`."""

    plan: SwitchPlan
    """What moved."""

    bytes_per_byte: float
    """Bytes that moved by those that the plan counts: gradients are fp32, the plan's parameters may be bf16."""

    seconds: float
    """How long this rank was at it, waiting for others included."""


class SwitchLog:
    """Times the switches of a step.

    Attributes:
        done: the switches of the last step, in order.
    """

    def __init__(self, device: torch.device, *, waits: bool) -> None:
        """Start with nothing.

        Args:
            device: of the model.
            waits: whether to wait for the device before and after each switch. Without, the times on a GPU are those
                of launching.
        """
        self._waits = waits and device.type == "cuda"
        self._figures: dict[SwitchPlan, SwitchFigures] = {}
        self.done: list[DoneSwitch] = []

    @property
    def seconds(self) -> float:
        """Of all switches of the step."""
        return sum(each.seconds for each in self.done)

    def start(self) -> None:
        """Forget the last step."""
        self.done = []

    @contextmanager
    def timed(self, title: str, plan: SwitchPlan, *, gradients: bool = False) -> Iterator[None]:
        """Time one switch."""
        start = self._now()
        yield
        seconds = self._now() - start
        factor = 4 / plan.tensors[0].tensor.dtype.itemsize if gradients else 1.0
        self.done.append(DoneSwitch(title=title, plan=plan, bytes_per_byte=factor, seconds=seconds))

    def prolong(self, seconds: float) -> None:
        """Add what the last switch took after it had been timed."""
        self.done[-1] = replace(self.done[-1], seconds=self.done[-1].seconds + seconds)

    def lines(self) -> list[str]:
        """Return a line about each switch of the last step."""
        return [self._line(each) for each in self.done]

    def _line(self, each: DoneSwitch) -> str:
        if each.plan not in self._figures:
            self._figures[each.plan] = measure_plan(each.plan)
        figures, factor = self._figures[each.plan], each.bytes_per_byte / _MIB
        return (
            f"hot switching: {each.title}: {1000 * each.seconds:.2f} ms, {figures.bytes_total * factor:.2f} MiB moved, "
            f"{figures.bytes_inter_node * factor:.2f} of it between nodes, between {figures.messages} pairs of ranks, "
            f"at most {figures.max_sent * factor:.2f} sent and {figures.max_received * factor:.2f} received by a rank"
        )

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter()
