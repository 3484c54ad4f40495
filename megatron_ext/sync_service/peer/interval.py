# SPDX-License-Identifier: Apache-2.0
"""When a peer's next round is due: after a set number of steps, or at the first step that ends after a set time."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_ext.sync_service.peer.job import Job

__all__ = ["Interval"]


class Interval:
    """The interval that a job is in.

    Rounds by time are those of A-EDiT (arXiv 2412.07210): peers of different speeds make different numbers of steps,
    and whoever waits does so for about one step of the slowest.
    """

    def __init__(
        self,
        job: Job,
        *,
        steps: int | None,
        seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin one.

        Args:
            job: its ranks; the clock of the first one counts.
            steps: from one round to the next; None where time decides.
            seconds: likewise; None where steps decide.
            clock: seconds, never going back.
        """
        self._job = job
        self._wanted_steps = steps
        self._wanted_seconds = seconds
        self._clock = clock
        self._began = clock()
        self.steps = 0
        """Completed steps of this interval."""

    @property
    def wanted_steps(self) -> int | None:
        """How many steps it has, so that a process that makes it again makes the same; None where time decides."""
        return self._wanted_steps

    @property
    def seconds(self) -> float:
        """How long it has lasted, by this rank's clock."""
        return self._clock() - self._began

    def restart(self) -> None:
        """Begin the next one."""
        self.resume(0, 0.0)

    def resume(self, steps: int, seconds: float) -> None:
        """Resume in one of which that much was over."""
        self.steps = steps
        self._began = self._clock() - seconds

    def count_step(self) -> bool:
        """Count a step; return whether the interval is over. All ranks call it."""
        self.steps += 1
        if self._wanted_steps is not None:
            return self.steps >= self._wanted_steps
        wanted = self._wanted_seconds
        assert wanted is not None
        return self._job.on_first(lambda: self.seconds >= wanted)
