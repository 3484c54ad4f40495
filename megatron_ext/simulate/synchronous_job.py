# SPDX-License-Identifier: Apache-2.0
"""Synchronous data-parallel training, the baseline: all workers reduce their gradients in every step."""

from __future__ import annotations

from typing import Any

from megatron_ext.local_sgd.round_cost import gradient_bytes
from megatron_ext.simulate.step_timer import StepTimer
from megatron_ext.simulate.time_ledger import TimeLedger
from megatron_ext.simulate.worker_links import WorkerLinks

__all__ = ["SynchronousJob", "synchronous_steps"]


def synchronous_steps(
    ledger: TimeLedger, timer: StepTimer, links: WorkerLinks, parameters: int, step_seconds: float, count: int
) -> None:
    """Let workers make steps together.

    Args:
        ledger: their clocks.
        timer: of their steps.
        links: between them.
        parameters: of the model.
        step_seconds: of a worker of average speed.
        count: of steps.
    """
    ledger.meet()
    begin, slowest = ledger.now, timer.together(count)
    # Both are drawn apart, but the slowest of each step takes at least as long as any worker.
    ledger.spend("training", (timer.own * count).clip(max=slowest))
    ledger.wait_until("waiting", begin + slowest)
    ledger.spend("sending", links.synchronous(parameters, step_seconds) * count)


class SynchronousJob:
    """See `SimulatedJob`."""

    def __init__(
        self, timer: StepTimer, links: WorkerLinks, *, workers: int, parameters: int, step_seconds: float, steps: int
    ) -> None:
        """Begin.

        Args:
            timer: of workers' steps.
            links: between workers.
            workers: how many.
            parameters: of the model.
            step_seconds: of a worker of average speed.
            steps: of the run.
        """
        self.ledger = TimeLedger(timer.counts)
        self.iteration = self.rounds = 0
        self.worker_bytes = 0.0
        self._timer, self._links = timer, links
        self._workers, self._parameters, self._step_seconds = workers, parameters, step_seconds
        self._steps = steps

    @property
    def worker_steps(self) -> int:
        """Of all workers together."""
        return self._workers * self.iteration

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.iteration >= self._steps

    def advance(self, until: int | None) -> None:
        """Train up to an iteration, or to the end."""
        end = self._steps if until is None else min(until, self._steps)
        count = end - self.iteration
        synchronous_steps(self.ledger, self._timer, self._links, self._parameters, self._step_seconds, count)
        self.worker_bytes += count * gradient_bytes(self._parameters, self._workers)
        self.iteration = end

    def land(self) -> None:
        """Nothing is in flight."""

    def state(self) -> Any:
        """Return the iteration."""
        return self.iteration

    def restore(self, state: Any) -> None:
        """Continue from an iteration."""
        self.iteration = state
