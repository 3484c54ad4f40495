# SPDX-License-Identifier: Apache-2.0
"""When experts are merged, and how much (SPES, arXiv 2602.11543)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MergeConfig"]


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """The warm-up in which experts take over a little of those that they resemble."""

    interval: int
    """Steps between two merges. They happen in rounds, hence at common multiples of this and the rounds' interval."""

    alpha_start: float = 0.01
    """How much an expert takes over at step 0, a fraction of 0 to 1."""

    decay_steps: int = 10000
    """Steps in which that goes down to 0 in a straight line; from then on nothing is merged."""

    topk: int = 4
    """How many experts every expert takes over from: those that it resembles most."""

    like_official: bool = False
    """Where there are no more experts than `topk`, count an expert among its own models, as the paper's code does,
    instead of taking over from all others."""

    def problems(self) -> list[str]:
        """Return the problems of the values, one sentence each; the fields are called as the server calls them."""
        found = []
        for name, allowed, rule in (
            ("interval", self.interval >= 1, "it must be 1 or more steps"),
            ("alpha_start", 0 < self.alpha_start <= 1, "it must be above 0 and at most 1"),
            ("decay_steps", self.decay_steps >= 1, "it must be 1 or more steps"),
            ("topk", self.topk >= 1, "it must be 1 or more"),
        ):
            if not allowed:
                found.append(f"merge_{name} is {getattr(self, name)}; {rule}")
        return found

    def alpha(self, step: int) -> float:
        """Return how much experts take over in a round after a step; 0 where nothing is merged.

        alpha(s) = alpha_start (1 - min(s / decay_steps, 1)) at multiples of the interval.

        Args:
            step: optimizer steps that every peer has made.
        """
        if step <= 0 or step % self.interval:
            return 0.0
        return self.alpha_start * (1 - min(step / self.decay_steps, 1))
