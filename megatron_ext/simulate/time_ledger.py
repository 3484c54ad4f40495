# SPDX-License-Identifier: Apache-2.0
"""Where the time of every worker of a simulated run goes. Every second of a clock has one cause."""

from __future__ import annotations

from typing import Literal, Self, get_args

import numpy as np

from megatron_ext.simulate.step_timer import Seconds

__all__ = ["CAUSES", "Cause", "TimeLedger"]

Cause = Literal["training", "waiting", "sending", "applying", "reducing", "saving", "restarting", "lost"]
"""Steps that count; until the slowest worker is there; until messages have come; a worker's own work in a round; the
server's; checkpoints; after a failure; what was done since the last checkpoint before a failure, or did not count."""

CAUSES: tuple[Cause, ...] = get_args(Cause)


class TimeLedger:
    """The workers' clocks.

    Attributes:
        clock: seconds since the run began, by kind of worker.
    """

    def __init__(self, counts: Seconds) -> None:
        """Begin at 0.

        Args:
            counts: workers of each kind.
        """
        self._counts = counts
        self.clock: Seconds = np.zeros(len(counts))
        self._spent: dict[Cause, Seconds] = {cause: np.zeros(len(counts)) for cause in CAUSES}

    @property
    def now(self) -> float:
        """When the last worker is where it is."""
        return float(self.clock.max())

    def spend(self, cause: Cause, seconds: Seconds | float) -> None:
        """Let time pass for every worker."""
        self.clock = self.clock + seconds
        self._spent[cause] = self._spent[cause] + seconds

    def wait_until(self, cause: Cause, time: float) -> None:
        """Let workers wait that are there before a time."""
        self.spend(cause, np.maximum(time - self.clock, 0.0))

    def meet(self) -> None:
        """Let all wait for the slowest."""
        self.wait_until("waiting", self.now)

    def copy(self) -> Self:
        """Return the same, independent of this one."""
        other = type(self)(self._counts)
        other.clock = self.clock
        other._spent = dict(self._spent)
        return other

    def fail(self, saved: TimeLedger, time: float, restart_seconds: float) -> None:
        """Go back to what was saved; the time until the failure is lost, and then the job restarts."""
        causes: tuple[Cause, ...] = ("lost", "restarting")
        failed_before = {cause: self._spent[cause] - saved._spent[cause] for cause in causes}
        self.clock, self._spent = saved.clock, dict(saved._spent)
        # Failures since then, after which there was no checkpoint yet.
        for cause, seconds in failed_before.items():
            self.spend(cause, seconds)
        self.wait_until("lost", time)
        self.spend("restarting", restart_seconds)

    def means(self) -> dict[Cause, float]:
        """Return the seconds of each cause, in the mean over the workers."""
        return {cause: float(np.average(spent, weights=self._counts)) for cause, spent in self._spent.items()}
