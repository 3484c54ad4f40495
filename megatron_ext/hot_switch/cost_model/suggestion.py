# SPDX-License-Identifier: Apache-2.0
"""What a step with a list of strategies should take."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.hot_switch.cost_model.step_time import StepParts
from megatron_ext.hot_switch.strategies.strategy_list import StrategyList

__all__ = ["Suggestion"]


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A list of strategies and what a step with it should take."""

    strategies: StrategyList
    """With buckets."""

    parts: tuple[StepParts, ...]
    """Where the time of every strategy goes, in the order of the list; none for a guest without data."""

    switching: float
    """Seconds of all switches of parameters and gradients of a step, at least."""

    moved: float
    """Bytes that those move, of all GPUs together."""

    memory: tuple[float, ...]
    """Bytes of the fullest GPU in every strategy's turn."""

    sequences: tuple[int, ...]
    """Sequences of the batch in every bucket."""

    positions: tuple[int, ...]
    """Positions computed for them, padding included."""

    @property
    def compute(self) -> tuple[float, ...]:
        """Seconds of every strategy, in the order of the list; 0 for a guest without data."""
        return tuple(part.seconds for part in self.parts)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.compute) + self.switching
