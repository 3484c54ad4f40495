# SPDX-License-Identifier: Apache-2.0
"""Local SGD with rounds by steps: plain, in fragments, with a delay, or with eager updates.

A round has two ways. Outward begins when the last worker has launched it; the owners step when it has come; homeward
begins when the last of them has stepped. A worker waits where its schedule needs what is not there yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.round_cost import gradient_bytes, message_bytes
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.codecs.all_codecs import EXACT_CODEC, build_codec
from megatron_ext.simulate.round_actions import RoundAction, actions_by_step
from megatron_ext.simulate.step_timer import StepTimer
from megatron_ext.simulate.synchronous_job import synchronous_steps
from megatron_ext.simulate.time_ledger import TimeLedger
from megatron_ext.simulate.worker_links import WorkerLinks

__all__ = ["LocalSGDJob"]


@dataclass(kw_only=True)
class _Flight:
    """A fragment's round in flight."""

    launched: float
    """When the last worker had launched it."""

    out: float
    """When the outward messages are there."""

    home: float | None = None
    """When the results are there; None before the outer step."""


class LocalSGDJob:
    """See `SimulatedJob`."""

    def __init__(
        self,
        timer: StepTimer,
        links: WorkerLinks,
        config: LocalSGDConfig,
        streaming: StreamingConfig,
        *,
        workers: int,
        fragments: Sequence[int],
        step_seconds: float,
        steps: int,
        round_work: float,
    ) -> None:
        """Begin.

        Args:
            timer: of workers' steps.
            links: between workers.
            config: interval, warm-up and codec.
            streaming: fragments and delay.
            workers: how many.
            fragments: values of each.
            step_seconds: of a worker of average speed.
            steps: of the run.
            round_work: seconds of a worker's own work in a round of all fragments.
        """
        self.ledger = TimeLedger(timer.counts)
        self.iteration = 0
        self.worker_bytes = 0.0
        self._timer, self._links = timer, links
        self._config, self._streaming = config, streaming
        self._workers, self._steps, self._step_seconds = workers, steps, step_seconds
        self._parameters = sum(fragments)
        codec = build_codec(config.codec or EXACT_CODEC, config.codec_density)
        self._ways = [message_bytes(codec, values, workers) for values in fragments]
        self._exact = message_bytes(build_codec(EXACT_CODEC), self._parameters, workers)
        self._work = [round_work * values / self._parameters for values in fragments]
        self._first, self._later = actions_by_step(streaming, config.local_sgd_sync_interval)
        self._flights: dict[int, _Flight] = {}
        self._made = 0
        """Rounds of single fragments."""

    @property
    def worker_steps(self) -> int:
        """Of all workers together."""
        return self._workers * self.iteration

    @property
    def rounds(self) -> int:
        """Rounds of all fragments."""
        return self._made // len(self._ways)

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.iteration >= self._steps

    def advance(self, until: int | None) -> None:
        """Train up to the next step after which something is due."""
        end = self._steps if until is None else min(until, self._steps)
        warmup = self._config.local_sgd_warmup_steps
        if self.iteration < warmup:
            count = min(end, warmup) - self.iteration
            synchronous_steps(self.ledger, self._timer, self._links, self._parameters, self._step_seconds, count)
            self.worker_bytes += count * gradient_bytes(self._parameters, self._workers)
            self.iteration += count
            return
        interval, made = divmod(self.iteration - warmup, self._config.local_sgd_sync_interval)
        actions = self._later if interval else self._first
        due = min((step for step in actions if step > made), default=self._config.local_sgd_sync_interval)
        count = min(end - self.iteration, due - made)
        self.ledger.spend("training", self._timer.steps(count))
        self.iteration += count
        if self.finished and self._streaming.active:
            self._finish()
        elif made + count == due:
            for action in actions.get(due, ()):
                self._act(action)

    def land(self) -> None:
        """Wait for the results of all rounds in flight; when they are applied stays as it is."""
        for fragment, flight in self._flights.items():
            if flight.home is None:
                self._answer(fragment)
            self.ledger.wait_until("sending", self._arrival(fragment))

    def state(self) -> Any:
        """Return iteration and rounds, and which are in flight."""
        return self.iteration, self._made, tuple(self._flights)

    def restore(self, state: Any) -> None:
        """Continue; results of rounds in flight were part of the checkpoint."""
        self.iteration, self._made, flying = state
        now = self.ledger.now
        self._links.restart(now)
        self._flights = {fragment: _Flight(launched=now, out=now, home=now) for fragment in flying}

    def _act(self, action: RoundAction) -> None:
        fragment = action.fragment
        if action.kind == "turn_late":
            if fragment in self._flights:
                self._turn_late(fragment)
        elif action.kind == "turn":
            if self._flights[fragment].home is None:  # else a checkpoint has turned it
                self._turn(fragment)
        elif action.kind == "end":
            self._end(fragment)
        else:
            self._made += 1
            self.worker_bytes += sum(self._ways[fragment])
            if self._streaming.eager:
                self._sync_eagerly(fragment)
            elif action.kind == "send":
                self.ledger.spend("applying", self._work[fragment] / 2)
                self._send(fragment)
            else:
                self.ledger.meet()
                self.ledger.spend("applying", self._work[fragment] / 2)
                self._send(fragment)
                self._turn(fragment)
                self._end(fragment)

    def _send(self, fragment: int) -> None:
        """Launch the outward way."""
        now = self.ledger.now
        self._flights[fragment] = _Flight(launched=now, out=self._links.launch(now, self._ways[fragment][0]))

    def _turn(self, fragment: int) -> None:
        """Wait for the outward way, add up the norms of all workers, make the outer step, launch the way home."""
        flight = self._flights[fragment]
        self.ledger.wait_until("waiting", flight.launched)
        self.ledger.wait_until("sending", flight.out)
        self.ledger.meet()
        self.ledger.spend("applying", self._work[fragment] / 2)
        flight.home = self._links.launch(self.ledger.now, self._ways[fragment][1])

    def _answer(self, fragment: int) -> None:
        """Launch the way home, whichever kind of round it is."""
        if self._streaming.eager:
            self._turn_late(fragment)
        else:
            self._turn(fragment)

    def _end(self, fragment: int) -> None:
        self.ledger.wait_until("sending", self._arrival(fragment))
        del self._flights[fragment]

    def _arrival(self, fragment: int) -> float:
        home = self._flights[fragment].home
        assert home is not None, "the round has not turned"
        return home

    def _sync_eagerly(self, fragment: int) -> None:
        """Step by the own share and the others' of the round before, add up norms, and send."""
        if fragment in self._flights:
            self._turn_late(fragment)
            self._end(fragment)
        self.ledger.spend("applying", self._work[fragment])
        self.ledger.meet()
        self._send(fragment)

    def _turn_late(self, fragment: int) -> None:
        """Wait for the others' messages of an eager round, and send back their mean."""
        flight = self._flights[fragment]
        if flight.home is not None:
            return
        self.ledger.wait_until("waiting", flight.launched)
        self.ledger.wait_until("sending", flight.out)
        flight.home = self._links.launch(self.ledger.now, self._ways[fragment][1])

    def _finish(self) -> None:
        """End what is in flight, then take the mean of all workers' values as they are."""
        for fragment in list(self._flights):
            if self._flights[fragment].home is None:
                self._answer(fragment)
            self._end(fragment)
        self.ledger.meet()
        for nbytes in self._exact:
            self.ledger.wait_until("sending", self._links.launch(self.ledger.now, nbytes))
        self.worker_bytes += sum(self._exact)
