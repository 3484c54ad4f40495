# SPDX-License-Identifier: Apache-2.0
"""What became of a simulated run with hot switching, or with a single strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.hot_switch.cost_model.suggestion import Suggestion
from megatron_ext.simulate.hot_switching.gpu_cluster import GIB

__all__ = ["SwitchingRun"]


@dataclass(frozen=True, kw_only=True)
class SwitchingRun:
    """Steps of one list of strategies."""

    steps: Sequence[Suggestion]
    """What each of them takes, all with the same strategies."""

    tokens: int
    """That are predicted in all steps together."""

    gpus: int
    """Of the job."""

    @property
    def time(self) -> Mapping[str, float]:
        """Seconds of all steps by cause, in the mean over the GPUs."""
        parts = [part for step in self.steps for part in step.parts]
        return {
            "training": sum(part.computing for part in parts),
            "waiting": sum(part.waiting for part in parts),
            "sending": sum(part.reducing for part in parts),
            "switching": sum(step.switching for step in self.steps),
        }

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(self.time.values())

    @property
    def utilisation(self) -> float:
        """Part of the time in which a GPU computes rows, padding and what is computed again included."""
        return self.time["training"] / self.seconds

    @property
    def padding(self) -> float:
        """Part of the positions that predict nothing."""
        return 1 - self.tokens / sum(sum(step.positions) for step in self.steps)

    @property
    def memory(self) -> float:
        """Bytes of the fullest GPU."""
        return max(self.steps[0].memory)

    @property
    def strategies(self) -> str:
        """Home first, each with what it computes again."""
        listed = self.steps[0].strategies.strategies
        again = {"none": "", "selective": " selective", "full": " full"}
        return " | ".join(strategy.label + again[strategy.recompute] for strategy in listed)

    @property
    def moved(self) -> float:
        """Bytes that a step's switches move, by GPU in the mean."""
        return sum(step.moved for step in self.steps) / len(self.steps) / self.gpus

    def as_json(self) -> dict[str, Any]:
        """Return the figures under their names."""
        return {
            "strategies": self.strategies,
            "utilisation": self.utilisation,
            "seconds": self.seconds,
            "steps": len(self.steps),
            "step_seconds": self.seconds / len(self.steps),
            "tokens_per_second": self.tokens / self.seconds,
            "padding": self.padding,
            "memory_bytes": self.memory,
            "switched_bytes": self.moved,
            "seconds_by_cause": dict(self.time),
        }

    def figures(self) -> dict[str, str]:
        """Return the figures for people, by name."""
        return {
            "strategies": self.strategies,
            "seconds a step": f"{self.seconds / len(self.steps):.3f}",
            "tokens/s": f"{self.tokens / self.seconds:,.0f}",
            "GiB of the fullest GPU": f"{self.memory / GIB:.1f}",
            "padding, %": f"{100 * self.padding:.1f}",
            "GB switched by a GPU": f"{self.moved / 1e9:.4g}",
            "utilisation": f"{self.utilisation:.3f}",
        }
