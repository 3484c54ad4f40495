# SPDX-License-Identifier: Apache-2.0
"""Local SGD with rounds by time (A-EDiT): workers make steps until their window is over, then meet."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.round_cost import message_bytes
from megatron_ext.local_sgd.time_based import makes_round, share_of_rest, window_end
from megatron_ext.outer.codecs.all_codecs import EXACT_CODEC, build_codec
from megatron_ext.simulate.step_timer import MARGIN, StepTimer
from megatron_ext.simulate.time_ledger import TimeLedger
from megatron_ext.simulate.worker_links import WorkerLinks

__all__ = ["TimedJob"]


class TimedJob:
    """See `SimulatedJob`. An iteration is a meeting, as in Megatron's loop."""

    def __init__(
        self,
        timer: StepTimer,
        links: WorkerLinks,
        config: LocalSGDConfig,
        *,
        workers: int,
        parameters: int,
        jitter: float,
        steps: int,
        round_work: float,
    ) -> None:
        """Begin.

        Args:
            timer: of workers' steps.
            links: between workers.
            config: the window, the fewest steps of a round, the codec.
            workers: how many.
            parameters: of the model.
            jitter: of steps.
            steps: of the run, per worker.
            round_work: seconds of a worker's own work in a round.
        """
        self.ledger = TimeLedger(timer.counts)
        self.iteration = self.rounds = self.worker_steps = 0
        self.worker_bytes = 0.0
        self._timer, self._links, self._config = timer, links, config
        self._total = workers * steps
        self._since = 0
        self._last: list[int] = [1] * len(timer.counts)
        """Steps since the meeting before, by kind of worker."""
        codec = build_codec(config.codec or EXACT_CODEC, config.codec_density)
        self._ways = message_bytes(codec, parameters, workers)
        self._jitter, self._work = jitter, round_work

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.worker_steps >= self._total

    def advance(self, until: int | None) -> None:
        """Train through a window, meet, and make a round if there are steps enough."""
        made = self._window()
        self.ledger.meet()
        together = int((made * self._timer.counts).sum())
        self.worker_steps += together
        self._since += together
        self._last = [int(count) for count in made]
        self.iteration += 1
        if not makes_round(self._config, self._since, finished=self.finished):
            return
        self._since = 0
        self.rounds += 1
        self.worker_bytes += sum(self._ways)
        self.ledger.spend("applying", self._work)
        for nbytes in self._ways:
            self.ledger.wait_until("sending", self._links.launch(self.ledger.now, nbytes))

    def _window(self) -> NDArray[np.int64]:
        """Let every worker make the steps of its window, and return how many those are."""
        timer, left = self._timer, self._total - self.worker_steps
        together = int(np.dot(self._last, timer.counts))
        most = np.array([share_of_rest(left, own, together) for own in self._last])
        end = window_end(self._config, self.ledger.now)
        expected = (end - self.ledger.clock) / timer.own
        sure = np.floor(expected - MARGIN * self._jitter * np.sqrt(expected)) - 1
        made: NDArray[np.int64] = np.minimum(np.maximum(sure, 0), most).astype(np.int64)
        self.ledger.spend("training", timer.steps(made))
        while True:
            # A window that is shorter than the clock can tell has a step, too.
            steps_again = ((self.ledger.clock < end) & (made < most)) | (made == 0)
            if not steps_again.any():
                return made
            made = made + steps_again
            self.ledger.spend("training", timer.steps(steps_again.astype(np.int64)))

    def land(self) -> None:
        """Nothing is in flight after a meeting."""

    def state(self) -> Any:
        """Return the counters."""
        return self.iteration, self.rounds, self.worker_steps, self._since, list(self._last)

    def restore(self, state: Any) -> None:
        """Continue from counters."""
        self.iteration, self.rounds, self.worker_steps, self._since, self._last = state
        self._links.restart(self.ledger.now)
