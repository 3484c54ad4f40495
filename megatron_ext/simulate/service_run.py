# SPDX-License-Identifier: Apache-2.0
"""Peers that meet at a sync service, simulated: the server's decisions are those of its own state machine.

A peer trains an interval, uploads it, awaits the round and takes its values. `RunState` says whether a contribution
still counts, when a round closes and who was in; `decide` where a peer resumes that has failed. Uploads share the
server's link, and so do downloads; one round is reduced at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np

from megatron_ext.errors import UserError
from megatron_ext.simulate.event_limits import MOST_EVENTS, FailureGuard
from megatron_ext.simulate.event_queue import EventQueue, SharedLink
from megatron_ext.simulate.job_run import SimulatedRun
from megatron_ext.simulate.service_peer import ServicePeer
from megatron_ext.simulate.step_timer import StepTimer
from megatron_ext.simulate.time_ledger import CAUSES, Cause
from megatron_ext.sync_service.protocol.resuming import Adopt, Claim, Continue, Wait
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.members import Policy
from megatron_ext.sync_service.rounds.resume import decide
from megatron_ext.sync_service.rounds.round import RunState

__all__ = ["ServiceLoad", "ServiceRun", "more_that_count"]

_RUN = "simulated"
_TO_COMMIT = 2
"""Messages one after the other from the last value's arrival until a contribution is on record: the receipt, and the
word that it is whole."""

_TO_VALUES = 3
"""From a round's commit until its first value arrives: the answer, the request, the values themselves."""

_ROUNDING = 1e-6
"""Seconds before its end at which a grace window is over; more where the clock itself is that coarse."""


@dataclass(frozen=True, kw_only=True)
class ServiceLoad:
    """What peers do, in seconds and bytes."""

    interval: int | None
    """Steps between two rounds; None where they are made for a time."""

    interval_seconds: float
    """That time."""

    delay: int
    """Steps that a peer makes while its round is made."""

    up: float
    """Bytes of a contribution."""

    down: float
    """Bytes of a round's values."""

    reduction_seconds: float
    """For one contribution."""

    messages: int
    """One after the other, that servers exchange in a round."""

    latency: float
    """Seconds of a message."""

    peer_link: float
    """Bytes per second of a peer's link, each way."""

    server_link: float
    """The same of the server's."""

    mean_life: float
    """Seconds between two failures of a peer; 0 for none."""

    restart_seconds: float
    """From a failure until the peer asks where to resume."""

    silence: float
    """Seconds from a failure until the server knows of it; infinity where peers send no heartbeats."""

    kept: int
    """Rounds whose values the server has, from which an interval may have begun that a peer resumes."""

    steps: int
    """That all peers together are to make."""


class ServiceRun:
    """The run of all peers."""

    def __init__(self, policy: Policy, load: ServiceLoad, timer: StepTimer, seed: int) -> None:
        """Let every peer register, and one publish the common start, which all have.

        Args:
            policy: when a round closes.
            load: what peers do.
            timer: of their steps, each a kind of its own.
            seed: of failures.
        """
        self._load, self._timer = load, timer
        self._queue = EventQueue()
        self._state = AsynchronousState(policy) if policy.is_asynchronous else RunState(policy)
        self._up = SharedLink(self._queue, load.server_link, load.peer_link)
        self._down = SharedLink(self._queue, load.server_link, load.peer_link)
        self._peers = [ServicePeer(index) for index in range(policy.peers)]
        self._by_name = {peer.name: peer for peer in self._peers}
        self._random = np.random.default_rng([seed, 1])
        self._reducing = False
        self._late: list[tuple[ServicePeer, int]] = []
        """Peers that await a round in which they are not, and their processes."""
        self._counted = self._rounds = self._failures = 0
        self._contributions = self._too_late = 0
        self._bytes = 0.0
        self._asked = -1.0
        for peer in self._peers:
            self._join(peer)
        self._state.apply({"event": "uploaded", "round": 0, "peer": self._peers[0].name})
        self._state.apply(self._state.closing_event())
        self._commit(self._state.closing or (), 0)

    def run(self) -> SimulatedRun:
        """Return what becomes of it, once all steps have been contributed.

        Raises:
            UserError: failures come faster than rounds, or contributions that count so seldom that it takes too long.
        """
        for peer in self._peers:
            self._state.adopted(peer.name, 0)
            self._train(peer)
            self._plan_failure(peer)
        count = len(self._peers)
        guard = FailureGuard(
            to_next="round",
            fails=f"a peer fails every {self._load.mean_life:.3g} s",
            shorter="--sync-service-interval" + ("-seconds" if self._load.interval is None else ""),
            processes=count,
        )
        while self._counted < self._load.steps and self._queue.step():
            guard.check(self._counted, self._failures)
            self._check_contributions()
        for peer in self._peers:
            peer.end(self._queue.now)
        return SimulatedRun(
            seconds=self._queue.now,
            worker_steps=self._counted,
            rounds=self._rounds,
            failures=self._failures,
            worker_bytes=self._bytes / count,
            time={cause: sum(peer.time[cause] for peer in self._peers) / count for cause in CAUSES},
            too_late=self._too_late / max(self._contributions, 1),
        )

    def _check_contributions(self) -> None:
        """Refuse to simulate a run without end, whose peers train for nothing.

        Raises:
            UserError: they have made too many contributions.
        """
        if self._contributions > MOST_EVENTS:
            too_late = f"{self._too_late / self._contributions:.0%}"
            raise UserError(
                f"the run makes more than {MOST_EVENTS} contributions, of which {too_late} come too late to count; "
                f"give {more_that_count(self._state.policy)}, or fewer --steps"
            )

    # What a peer does.

    def _train(self, peer: ServicePeer) -> None:
        """Make the rest of an interval, or the steps of its delay while the round before is not applied."""
        load = self._load
        if load.interval is None:
            steps, seconds = self._timer.until(peer.index, load.interval_seconds)
        else:
            steps = load.interval - peer.made[0] if peer.applied else load.delay
            seconds = self._timer.of_one(peer.index, steps)
        peer.train(steps, seconds, self._queue.now)
        self._after(seconds, peer, self._end_of_steps)

    def _end_of_steps(self, peer: ServicePeer) -> None:
        now, load = self._queue.now, self._load
        if peer.repeating:
            peer.lose_interval(now)
            peer.repeating = False
            if peer.awaited:
                peer.wait_for("waiting", now)
            else:
                peer.wait_for("sending", now)
                self._download(peer)
        elif not peer.applied:
            peer.wait_for(self._awaits(peer), now)
        elif load.interval is not None and peer.made[0] < load.interval:
            self._train(peer)
        else:
            peer.finish_interval()
            self._contributions += 1
            peer.wait_for("sending", now)
            self._after(load.latency, peer, self._upload)
            if load.delay:
                self._train(peer)

    def _awaits(self, peer: ServicePeer) -> Cause:
        if not peer.awaited:
            return "sending"
        return "reducing" if peer.name in (self._state.closing or ()) else "waiting"

    def _upload(self, peer: ServicePeer) -> None:
        if not self._accepts(peer):
            self._come_too_late(peer)
            return
        self._bytes += self._load.up
        life = peer.life
        peer.transfer = self._up.begin(self._load.up, lambda: self._arrived(peer) if peer.life == life else None)

    def _accepts(self, peer: ServicePeer) -> bool:
        number = peer.base + 1
        if self._state.accepts(peer.name, number):
            return True
        stale = self._state.stale_event(peer.name, number)
        if stale is not None:
            self._state.apply(stale)
        return False

    def _arrived(self, peer: ServicePeer) -> None:
        peer.transfer = None
        self._after(_TO_COMMIT * self._load.latency, peer, self._uploaded)

    def _uploaded(self, peer: ServicePeer) -> None:
        if not self._accepts(peer):
            self._come_too_late(peer)
            return
        steps = peer.in_flight[0] if peer.in_flight else 0
        end = peer.place.after(steps)
        event = {"event": "uploaded", "round": peer.base + 1, "peer": peer.name, "steps": steps}
        self._state.apply({**event, "progress": list(astuple(end))})
        peer.awaited = True
        peer.wait_still_for("waiting", self._queue.now)
        self._consider()

    def _come_too_late(self, peer: ServicePeer) -> None:
        """Let a contribution be lost, and await its round, or take what is newer."""
        peer.resolve(counted=False)
        self._too_late += 1
        answer, _ = self._state.answer(peer.name, peer.base + 1, uploaded=False)
        if answer == "committed":
            self._download(peer)
        else:
            self._late.append((peer, peer.life))
            peer.wait_still_for("waiting", self._queue.now)

    def _download(self, peer: ServicePeer) -> None:
        """Take the values of the newest round."""
        peer.wait_still_for("sending", self._queue.now)
        newest = self._state.newest
        assert newest is not None, "there is the common start"
        self._state.adopted(peer.name, newest.number)
        life, number = peer.life, newest.number

        def begin(peer: ServicePeer) -> None:
            self._down.begin(
                self._load.down, lambda: self._downloaded(peer, number) if peer.life == life else None
            )

        self._after(_TO_VALUES * self._load.latency, peer, begin)

    def _downloaded(self, peer: ServicePeer, number: int) -> None:
        peer.base, peer.applied = number, True
        peer.place = self._state.counted.get(peer.index, peer.place)
        if peer.is_waiting:
            self._train(peer)

    # What the server does.

    def _consider(self) -> None:
        """Close the open round, should it be due."""
        if self._reducing:
            return
        seconds = self._state.seconds_until_close(self._queue.now, lambda name: self._by_name[name].gone_from)
        if seconds is None:
            return
        if seconds > max(_ROUNDING, 4 * math.ulp(self._queue.now)):
            if self._asked != self._queue.now + seconds:
                self._asked = self._queue.now + seconds
                self._queue.at(self._asked, self._consider)
            return
        self._state.apply(self._state.closing_event())
        closing = self._state.closing or ()
        self._reducing = True
        number = self._state.open_round
        for name in closing:
            self._by_name[name].wait_still_for("reducing", self._queue.now)
        if not self._state.policy.is_asynchronous:
            self._turn_away(number)
        seconds = self._load.reduction_seconds * len(closing) + self._load.messages * self._load.latency
        self._queue.at(self._queue.now + seconds, lambda: self._reduced(closing, number))

    def _turn_away(self, number: int) -> None:
        """End the uploads to a round that has closed without them."""
        for peer in self._peers:
            if peer.transfer is not None and peer.base + 1 == number:
                self._up.cancel(peer.transfer)
                peer.transfer = None
                self._come_too_late(peer)

    def _reduced(self, closing: tuple[str, ...], number: int) -> None:
        self._commit(closing, number)
        self._rounds += 1
        self._reducing = False
        for name in closing:
            peer = self._by_name[name]
            peer.awaited = False
            self._counted += peer.resolve(counted=True)
            if peer.alive and not peer.repeating:
                self._download(peer)
        late, self._late = self._late, []
        for peer, life in late:
            if peer.life == life:
                self._download(peer)
        self._consider()

    def _commit(self, closing: tuple[str, ...], number: int) -> None:
        self._state.apply(
            {
                "event": "committed",
                "round": number,
                "digest": _digest(number),
                "contributors": list(closing),
                "rejected": {},
                "outer_scalars": {},
            }
        )

    # Failures.

    def _plan_failure(self, peer: ServicePeer) -> None:
        if self._load.mean_life:
            self._after(float(self._random.exponential(self._load.mean_life)), peer, self._fail)

    def _fail(self, peer: ServicePeer) -> None:
        """End a peer's process: what it has not uploaded is lost, and what it has uploaded counts."""
        self._failures += 1
        if peer.transfer is not None:
            self._up.cancel(peer.transfer)
            peer.transfer = None
        peer.die(self._queue.now, self._load.silence)
        self._consider()
        self._after(self._load.restart_seconds, peer, self._resume)

    def _resume(self, peer: ServicePeer) -> None:
        """Ask the server where to resume, with the checkpoint of the interval's begin."""
        peer.start_again()
        self._join(peer)
        self._plan_failure(peer)
        newest = self._state.newest
        assert newest is not None, "there is the common start"
        claim = Claim(
            round=peer.base,
            digest=_digest(peer.base),
            whole=True,
            repeats=self._load.interval is not None,
            steps=self._load.interval,
            begin=peer.place,
            now=peer.place,
        )
        kept = range(max(newest.number + 1 - self._load.kept, 0), newest.number + 1)
        answer = decide(self._state.ledger(_RUN, peer.name, kept), claim)
        peer.applied = True
        if isinstance(answer, Continue):
            peer.repeating = not answer.send
            self._train(peer)
        elif isinstance(answer, Wait):
            peer.wait_for("waiting", self._queue.now)
        else:
            assert isinstance(answer, Adopt), answer
            peer.wait_for("sending", self._queue.now)
            self._download(peer)

    def _join(self, peer: ServicePeer) -> None:
        event = self._state.check_joining(peer.name, str(peer.life), peer.index)
        if event is not None:
            self._state.apply(event)

    def _after(self, seconds: float, peer: ServicePeer, action: Callable[[ServicePeer], None]) -> None:
        """Let a peer's process do something later, should it still be there."""
        life = peer.life
        self._queue.at(self._queue.now + seconds, lambda: action(peer) if peer.life == life else None)


def more_that_count(policy: Policy) -> str:
    """Return which options let more contributions count."""
    if policy.is_asynchronous:
        return "a larger --max-staleness, near the number of peers"
    return "a larger --quorum or --grace-seconds"


def _digest(number: int) -> str:
    """Return what stands for a round's values."""
    return f"{number:x}"
