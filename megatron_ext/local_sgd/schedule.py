# SPDX-License-Identifier: Apache-2.0
"""When the rounds of every fragment begin, turn and end, counted in inner steps."""

from __future__ import annotations

from collections.abc import Collection

from megatron_ext.local_sgd.streaming import due_steps

__all__ = ["RoundSchedule", "last_step"]


def last_step(iterations: int, skipped: Collection[int]) -> int:
    """Return the last iteration of a run in which a step is made, counted from 1; 0 where there is none.

    Args:
        iterations: of the run.
        skipped: the iterations in which Megatron makes no step.
    """
    return next((iteration for iteration in range(iterations, 0, -1) if iteration not in skipped), 0)


class RoundSchedule:
    """Counts the steps of an interval, and those for which rounds are still in flight."""

    def __init__(self, fragments: int, *, interval: int, delay: int, eager: bool) -> None:
        """Begin an interval.

        Args:
            fragments: how many there are.
            interval: H, steps between two rounds of a fragment.
            delay: tau, steps that a round is in flight, below `interval`.
            eager: whether messages of a round have the whole interval to travel.
        """
        self.interval = interval
        self.steps = 0
        """Since the interval began."""
        self.left = [0] * fragments
        """By fragment, steps until the round in flight ends; 0 without one."""
        self._due = due_steps(fragments, interval)
        self._delay = delay
        self._eager = eager

    def count(self) -> None:
        """Count a step: rounds in flight are one step nearer."""
        self.steps += 1
        self.left = [max(left - 1, 0) for left in self.left]

    def begins(self, fragment: int) -> bool:
        """Return whether the fragment's round begins after this step."""
        return self.steps == self._due[fragment]

    def launch(self, fragment: int) -> None:
        """Take note that the fragment's round is in flight."""
        self.left[fragment] = self._delay

    def turns(self, fragment: int) -> bool:
        """Return whether a round in flight is half-way, or at its end."""
        return self.left[fragment] in (self._delay // 2, 0)

    def ends(self, fragment: int) -> bool:
        """Return whether a round in flight is at its end."""
        return self.left[fragment] == 0

    def answers(self, fragment: int) -> bool:
        """Return whether half of the interval after an eager round is over."""
        return self._eager and (self.steps - self._due[fragment]) % self.interval == self.interval // 2

    def end_of_step(self) -> None:
        """Begin the next interval when this one is over; rounds may be in flight."""
        if self.steps == self.interval:
            self.steps = 0

    def restart(self) -> None:
        """Begin an interval now, with nothing in flight."""
        self.steps = 0
        self.left = [0] * len(self.left)

    def resume(self, steps: int) -> None:
        """Resume in mid-interval. An interval shorter than the one before has its round after the next step."""
        self.steps = min(steps, self.interval - 1)
