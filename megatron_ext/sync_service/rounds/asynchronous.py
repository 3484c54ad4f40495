# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds as a state machine: every contribution is a round of its own, in the order in which they came.

A peer contributes what it has learned since the values that it continued from, which may be older than the newest ones.
Nobody is awaited. The order of the journal's `uploaded` is that of the rounds, so that a restarted server makes the
same ones. The common start is that of synchronous rounds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.journal import Event
from megatron_ext.sync_service.rounds.members import GoneFrom, Policy, RoundResult, never
from megatron_ext.sync_service.rounds.resume import Ledger
from megatron_ext.sync_service.rounds.round import Answer, RunState

__all__ = ["AsynchronousState"]


class AsynchronousState(RunState):
    """The state of a run whose peers do not wait for each other.

    A contribution is *made for* the round after the one whose values it started from, and used in the open one.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.beside = {}
        self._made_for: dict[str, int] = {}
        self._outcomes: dict[str, tuple[int, RoundResult]] = {}

    # What is.

    def awaited(self) -> list[str]:
        """Return who has to publish the start; nobody is awaited later."""
        return super().awaited() if self.open_round == 0 else []

    def made_for(self, peer: str) -> int:
        """Return the round that a peer's committed contribution was made for."""
        return self._made_for.get(peer, self.open_round)

    def contributed(self, peer: str) -> int | None:
        """Return the round that a peer's last committed contribution was made for; None when it has made none."""
        if peer in self.uploaded:
            return self.made_for(peer)
        return self._outcomes[peer][0] if peer in self._outcomes else None

    def ledger(self, run: str, peer: str, kept: Collection[int]) -> Ledger:
        """See `RunState`. Nobody waits, so that an interval may have begun with values of an earlier round."""
        found = super().ledger(run, peer, kept)
        bases = {
            number: result.digest
            for number, result in self.results.items()
            if number in kept and not self._is_stale(number + 1)
        }
        used, last = self._outcomes.get(peer, (-1, None))
        counted = dict(found.counted)
        if last is not None and peer in last.contributors:
            counted[last.number] = frozenset(last.excluded.get(peer, {}))
        return replace(
            found,
            is_asynchronous=True,
            bases=bases,
            used=used,
            counted=counted,
            # The last one is remembered, and there were none since.
            forgotten=min(found.forgotten, used - 1),
        )

    def is_made_without(self, peer: str) -> bool:
        """Return that no round of others is in a peer's way, except the common start."""
        return self.open_round == 0 and super().is_made_without(peer)

    def outcome(self, peer: str, number: int) -> RoundResult | None:
        """Return the round in which a peer's contribution was used, when it is the last one of that peer."""
        made_for, result = self._outcomes.get(peer, (-1, None))
        return result if made_for == number else None

    def counts(self, peer: str, number: int) -> bool:
        """Return whether a peer's contribution is in."""
        return self.contributed(peer) == number

    def answer(self, peer: str, number: int, uploaded: bool) -> Answer:
        """Return what a member is to do that has made a contribution for a round, or only wants the newest values."""
        if number > self.open_round or self.open_round == 0:
            return super().answer(peer, number, uploaded)
        if number == 0:
            return "committed", ""
        if peer in self.uploaded:
            return "waiting", self.waiting_for()
        if uploaded and self._is_new(peer, number):
            return "upload", "the contribution was lost on the server"
        return "committed", ""

    def waiting_for(self) -> str:
        """Return in words what the open round waits for."""
        if self.open_round == 0:
            return super().waiting_for()
        if self.closing is not None:
            return f"round {self.open_round} is being made of what {self.closing[0]} has contributed"
        if self.uploaded:
            return f"the contributions of {', '.join(self.uploaded)} are next"
        return f"round {self.open_round} is whose contribution comes next"

    def seconds_until_close(self, now: float, gone_from: GoneFrom = never) -> float | None:
        """Return 0 when there is a contribution to be used, else None: nobody is waited for."""
        if self.open_round == 0:
            return super().seconds_until_close(now, gone_from)
        return 0.0 if self.uploaded or self.closing is not None else None

    def closing_event(self) -> Event:
        """Return the event that makes a round of the contribution that came first."""
        if self.open_round == 0:
            return super().closing_event()
        peer = next(iter(self.uploaded))
        return {
            "event": "closed",
            "round": self.open_round,
            "peers": [peer],
            "missing": [],
            "made_for": self.made_for(peer),
        }

    # What may be.

    def accepts(self, peer: str, number: int) -> bool:
        """Return whether a member's contribution may still come in.

        Raises:
            Refusal: the round that it is for is not there yet, or an earlier contribution of the peer is not used yet.
        """
        if number == 0 or number > self.open_round:
            return super().accepts(peer, number)
        if peer in self.uploaded:
            if self.made_for(peer) != number:
                raise Refusal("later", f"what peer {peer!r} has contributed before is not used yet; try again")
            return peer not in (self.closing or ())
        return self._is_new(peer, number) and not self._is_stale(number)

    def stale_event(self, peer: str, number: int) -> Event | None:
        """Return the event that says that a contribution is too old to count, unless there has been one."""
        # A call may come so late that there is a newer contribution.
        if not 0 < number <= self.open_round or not self._is_stale(number) or not self._is_new(peer, number):
            return None
        between, limit = self.open_round - number, self.policy.max_staleness
        reason = f"{between} rounds were made since the values that it started from; max_staleness is {limit}"
        return {"event": "stale", "peer": peer, "round": number, "reason": reason}

    def _is_new(self, peer: str, number: int) -> bool:
        """Return whether neither this contribution of a peer nor a later one has come."""
        earlier = self.contributed(peer)
        return earlier is None or number > earlier

    def _is_stale(self, number: int) -> bool:
        return self.policy.is_stale(number, self.open_round)

    # What has happened.

    def apply(self, event: Event) -> None:
        """Take an event in."""
        if event["event"] == "stale":
            self._stale(event)
        super().apply(event)

    def as_json(self) -> dict[str, Any]:
        """Return everything that events have led to."""
        return {
            **super().as_json(),
            "beside": [[index, *found] for index, found in (self.beside or {}).items()],
            "made_for": dict(self._made_for),
            "outcomes": [[peer, number, asdict(result)] for peer, (number, result) in self._outcomes.items()],
        }

    def _recovered(self, event: Event) -> None:
        super()._recovered(event)
        found = event["state"]
        self.beside = {index: (peer, work) for index, peer, work in found.get("beside", ())}
        self._made_for = dict(found["made_for"])
        self._outcomes = {
            peer: (number, RoundResult.from_json(result)) for peer, number, result in found["outcomes"]
        }

    def _stale(self, event: Event) -> None:
        newest = self.newest
        assert newest is not None
        result = RoundResult(
            number=newest.number,
            digest=newest.digest,
            contributors=(),
            rejected={event["peer"]: event["reason"]},
        )
        self._outcomes[event["peer"]] = event["round"], result
        self._count_unused(event["peer"], unused=True)

    def _uploaded(self, event: Event) -> None:
        super()._uploaded(event)
        self._made_for[event["peer"]] = event["round"]

    def _evicted(self, event: Event) -> None:
        # What is not being used yet does not count any more, whoever else's is.
        if event["peer"] not in (self.closing or ()):
            self._drop_upload(event["peer"])
        super()._evicted(event)

    def _closed(self, event: Event) -> None:
        if event["round"] == 0:
            super()._closed(event)
            return
        self.closing = tuple(event["peers"])
        index = self.uploaded[self.closing[0]]
        others = [member for member in self.members.values() if member.index != index]
        self.beside = {member.index: (member.name, self.work(member.name)) for member in others}

    def _committed(self, event: Event) -> None:
        closing = self.closing or ()
        waiting = {peer: index for peer, index in self.uploaded.items() if peer not in closing}
        super()._committed(event)
        self.uploaded, self.beside = waiting, {}
        for peer in closing:
            self._outcomes[peer] = self._made_for.pop(peer), self.results[event["round"]]
            self._count_unused(peer, unused=peer in event["rejected"])

    def _count_unused(self, peer: str, *, unused: bool) -> None:
        """Take note of how many contributions in a row were of no use."""
        member = self.members.get(peer)
        if member is not None:
            member.missed = member.missed + 1 if unused else 0
