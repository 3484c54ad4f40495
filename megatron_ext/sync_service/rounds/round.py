# SPDX-License-Identifier: Apache-2.0
"""Membership and rounds of a run as a state machine: no clock, no disk, no network.

Everything that changes it is an event of the journal, so that a restarted server gets back to where it was by applying
the events again. `check_*` methods say beforehand whether a request may become an event.

Round 0 is the common start: one peer publishes it. A later round closes when all peers that are awaited have committed
their upload, or a grace window after a quorum of them has, which ends early where all others are gone. Only who was in
when it closed counts in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, astuple
from typing import Any, Literal

from megatron_ext.phrases import listed
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.report import Progress
from megatron_ext.sync_service.protocol.resuming import KEPT_RESULTS
from megatron_ext.sync_service.rounds.journal import Event
from megatron_ext.sync_service.rounds.members import GoneFrom, Member, Policy, RoundResult, never
from megatron_ext.sync_service.rounds.resume import Ledger, Recorded

__all__ = ["Answer", "RunState"]

Answer = tuple[Literal["waiting", "committed", "publish", "upload"], str]
"""What is to be done by a peer that awaits a round, and why."""


class RunState:
    """The state of a run."""

    beside: dict[int, tuple[str, int | None]] | None = None
    """By index the other members when the open round closed of which contributions come one by one: name, and work in
    the last interval, if it is said. None where they meet."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.config: dict[str, str] | None = None
        self.catalog: list[dict[str, Any]] = []
        self.places = policy.peers
        self.rounds = ""
        self.kept_states: dict[str, str | int] | None = None
        self.protocol: int | None = None
        self.sharding: dict[str, Any] | None = None
        self.members: dict[str, Member] = {}
        self.publisher: str | None = None
        self.evicted: dict[str, tuple[str, str]] = {}
        self.uploaded: dict[str, int] = {}
        self.counted: dict[int, Progress] = {}
        """By index, whose part of the samples it counts, whoever has it."""
        self.certificates: dict[str, str] = {}
        """Whose certificate the name of a peer belongs to."""
        self.data: dict[int, str] = {}
        """By index, what the samples were drawn from of that place's contributions, as its peers have said."""
        self._reported: dict[str, tuple[int, Progress]] = {}
        self._steps: dict[str, int] = {}
        self._batches: dict[str, int] = {}
        self.closing: tuple[str, ...] | None = None
        self.results: dict[int, RoundResult] = {}
        self.outer_scalars: dict[str, float] = {}
        self._newest = -1
        self._quorum_since: float | None = None

    # -----------------------------------------------------------------------------------------------------------
    # What is
    # -----------------------------------------------------------------------------------------------------------

    @property
    def open_round(self) -> int:
        """The round that takes contributions, or that is being reduced."""
        return self._newest + 1

    @property
    def newest(self) -> RoundResult | None:
        """The newest committed round."""
        return self.results.get(self._newest)

    def awaited(self) -> list[str]:
        """Return who has to commit an upload before the open round closes by itself, in order."""
        if self.open_round == 0:
            return [] if self.uploaded or self.publisher is None else [self.publisher]
        members = sorted(self.members.values(), key=lambda member: member.index)
        return [member.name for member in members if member.awaited and member.name not in self.uploaded]

    def made_for(self, peer: str) -> int:
        """Return the round that a contribution was made for which counts in the open one."""
        return self.open_round

    def contributed(self, peer: str) -> int | None:
        """Return the open round when a peer's contribution to it is there, else None."""
        return self.open_round if peer in self.uploaded else None

    def ledger(self, run: str, peer: str, kept: Collection[int]) -> Ledger:
        """Return what decides where a member resumes.

        Args:
            run: the run id.
            peer: the member.
            kept: rounds whose values are there.
        """
        newest = self.newest
        return Ledger(
            run=run,
            newest=self._newest,
            bases={} if newest is None else {newest.number: newest.digest},
            end=self.counted.get(self.members[peer].index),
            recorded=self._recorded(peer),
            is_made_without=self.is_made_without(peer),
            counted=self._counted_in(peer),
            forgotten=self._newest - KEPT_RESULTS,
        )

    def work(self, peer: str) -> int | None:
        """Return by what a peer's contribution is weighted: the steps of its last interval, or the samples.

        None where it has not said.
        """
        steps = self._steps.get(peer)
        if steps is None or not self.policy.weighs_tokens:
            return steps
        batch = self._batches.get(peer)
        return None if batch is None else steps * batch

    def _recorded(self, peer: str) -> Recorded | None:
        """Return a peer's contribution that is not used yet."""
        if peer not in self.uploaded:
            return None
        end = self._reported[peer][1] if peer in self._reported else None
        return Recorded(made_for=self.made_for(peer), steps=self._steps.get(peer), end=end)

    def _counted_in(self, peer: str) -> dict[int, frozenset[str]]:
        """Return the rounds in which a peer's contributions counted, and in which units they did not."""
        return {
            number: frozenset(result.excluded.get(peer, {}))
            for number, result in self.results.items()
            if peer in result.contributors
        }

    def is_made_without(self, peer: str) -> bool:
        """Return whether the open round takes no contributions any more, and has none of a peer."""
        return self.closing is not None and peer not in self.closing

    def outcome(self, peer: str, number: int) -> RoundResult | None:
        """Return the round in which a peer's contribution to a round was used, while that is remembered."""
        return self.results.get(number)

    def counts(self, peer: str, number: int) -> bool:
        """Return whether a peer's contribution was in when the round closed that it was made for."""
        if number == self.open_round:
            return peer in (self.closing or ())
        result = self.outcome(peer, number)
        return result is not None and (peer in result.contributors or peer in result.rejected)

    def answer(self, peer: str, number: int, uploaded: bool) -> Answer:
        """Return what a member is to do that awaits a round.

        Args:
            peer: the member.
            number: the round.
            uploaded: whether it believes to have contributed.

        Raises:
            Refusal: the round is not open yet.
        """
        if self._newest >= number:
            # What a peer makes of the newest values counts in the round after them, which must not be closed by then.
            return ("waiting", self.waiting_for()) if self.is_made_without(peer) else ("committed", "")
        if number > self.open_round:
            raise Refusal("state", f"round {number} is not open yet; the open one is {self.open_round}")
        if self.closing is None and peer not in self.uploaded:
            if number == 0 and self.publisher == peer:
                return "publish", ""
            if uploaded:
                return "upload", "the contribution was lost on the server"
        return "waiting", self.waiting_for()

    def waiting_for(self) -> str:
        """Return in words what the open round waits for."""
        if self.closing is not None:
            return f"round {self.open_round} is being reduced"
        names = ", ".join(self.awaited())
        if self.open_round == 0:
            return f"the common start is awaited from {names}" if names else "nobody has registered yet"
        lacking = self.policy.quorum - len(self.uploaded)
        if lacking > 0:
            known = f" (of the members {names} are awaited)" if names else " (more peers have to register)"
            return f"round {self.open_round} needs {lacking} more of its quorum of {self.policy.quorum}{known}"
        return f"round {self.open_round} awaits {names}"

    def seconds_until_close(self, now: float, gone_from: GoneFrom = never) -> float | None:
        """Return after how many seconds the open round is to be closed: 0 for now, None for not as things are.

        Args:
            now: seconds on a clock that never goes back.
            gone_from: until when to wait for a peer on that clock, should its process say nothing more. It is awaited
                no longer than that, however long the grace window is.
        """
        if self.closing is not None:
            return 0.0
        if self.open_round == 0:
            return 0.0 if self.uploaded else None
        if len(self.uploaded) < self.policy.quorum:
            self._quorum_since = None
            return None
        if self._quorum_since is None:
            self._quorum_since = now
        awaited = self.awaited()
        if not awaited:
            return 0.0
        grace_ends = self._quorum_since + self.policy.grace_seconds
        return max(0.0, min(grace_ends, max(map(gone_from, awaited))) - now)

    def closing_event(self) -> Event:
        """Return the event that closes the open round now."""
        peers = sorted(self.uploaded, key=lambda name: (self.uploaded[name], name))
        return {"event": "closed", "round": self.open_round, "peers": peers, "missing": self.awaited()}

    # -----------------------------------------------------------------------------------------------------------
    # What may be
    # -----------------------------------------------------------------------------------------------------------

    def check_caller(self, peer: str, instance: str) -> Member:
        """Return the member on whose behalf a process speaks.

        Raises:
            Refusal: the peer is not a member, was evicted, or another process has taken its place.
        """
        member = self.members.get(peer)
        if member is None:
            gone, reason = self.evicted.get(peer, ("", ""))
            if gone == instance:
                raise Refusal("denied", _evicted_because(peer, reason))
            raise Refusal("state", f"peer {peer!r} is not a member of the run; it has to register first")
        if member.instance != instance:
            raise Refusal(
                "state",
                f"another process has registered as peer {peer!r} since; give every process a peer name of its own",
            )
        return member

    def check_joining(self, peer: str, instance: str, index: int | None) -> Event | None:
        """Return the event that makes a peer a member, None when it is one.

        Raises:
            Refusal: there is no place for it, or the process was evicted.
        """
        member = self.members.get(peer)
        if member is not None:
            if index not in (None, member.index):
                raise Refusal("state", f"index {index} is asked for by peer {peer!r}, which has index {member.index}")
            if member.instance == instance:
                return None
            return {"event": "joined", "peer": peer, "index": member.index, "instance": instance}
        gone, reason = self.evicted.get(peer, ("", ""))
        if gone == instance:
            raise Refusal("denied", _evicted_because(peer, reason))
        return {"event": "joined", "peer": peer, "index": self._place(peer, index), "instance": instance}

    def _place(self, peer: str, index: int | None) -> int:
        taken = {member.index: member.name for member in self.members.values()}
        # Of two contributions with one index, the open round would count both, and judge them as one.
        here = {member.name: member.index for member in self.members.values()}
        left = {place: name for name, place in self.uploaded.items() if here.get(name) != place and name != peer}
        count = self.policy.peers
        if index is None and peer in self.uploaded:
            index = self.uploaded[peer]
        if index in left:
            raise Refusal(
                "later",
                f"index {index} is asked for, but what peer {left[index]!r} has contributed with it before it left "
                f"counts in round {self.open_round}; it is free after that",
            )
        if index is not None:
            if index >= count:
                raise Refusal("state", f"index {index} is asked for, but the run has places 0 to {count - 1}")
            if index in taken:
                raise Refusal("state", f"index {index} is asked for, but peer {taken[index]!r} has it")
            return index
        free = [place for place in range(count) if place not in taken and place not in left]
        if not free and left:
            names = listed(list(left.values()), more="other")
            raise Refusal(
                "later",
                f"what {names} contributed before leaving still counts in round {self.open_round}; a place is free "
                "after that",
            )
        if not free:
            names = listed([taken[place] for place in sorted(taken)], more="other")
            raise Refusal(
                "state", f"all {count} places of the run are taken ({names}); one has to leave or be evicted first"
            )
        return free[0]

    def accepts(self, peer: str, number: int) -> bool:
        """Return whether a member's contribution to a round may still come in; False when the round is closed.

        Raises:
            Refusal: the round is not open yet, or the start is somebody else's to publish.
        """
        if number > self.open_round:
            raise Refusal("state", f"round {number} is not open yet; the open one is {self.open_round}")
        if number < self.open_round or self.closing is not None:
            return False
        if number == 0 and peer != self.publisher:
            raise Refusal("state", f"the common start is published by peer {self.publisher!r}")
        return True

    def stale_event(self, peer: str, number: int) -> Event | None:
        """Return the event that says that a contribution is too old to count: there is none in rounds of all peers."""
        return None

    @property
    def is_deserted(self) -> bool:
        """Whether there is neither a round, nor a contribution to one, nor a peer."""
        return self.open_round == 0 and not (self.members or self.uploaded or self.closing)

    # -----------------------------------------------------------------------------------------------------------
    # What has happened
    # -----------------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Take an event in. Events that say nothing about the state change nothing."""
        handlers: dict[str, Callable[[Event], None]] = {
            "created": self._created,
            "joined": self._joined,
            "left": self._gone,
            "evicted": self._evicted,
            "uploaded": self._uploaded,
            "forgotten": self._forgotten,
            "closed": self._closed,
            "committed": self._committed,
            "recovered": self._recovered,
        }
        handler = handlers.get(event["event"])
        if handler is not None:
            handler(event)

    def as_json(self) -> dict[str, Any]:
        """Return everything that events have led to, as plain data, for the event `recovered`. It is a copy."""
        return {
            "created": None if self.config is None else self._created_as_json(),
            "members": [asdict(member) for member in self.members.values()],
            "publisher": self.publisher,
            "certificates": dict(self.certificates),
            "data": list(self.data.items()),
            "evicted": [[peer, instance, reason] for peer, (instance, reason) in self.evicted.items()],
            "uploaded": dict(self.uploaded),
            "reported": [[peer, index, astuple(progress)] for peer, (index, progress) in self._reported.items()],
            "steps": dict(self._steps),
            "batches": dict(self._batches),
            "counted": [[index, astuple(progress)] for index, progress in self.counted.items()],
            "closing": self.closing,
            "results": [asdict(result) for result in self.results.values()],
            "outer_scalars": dict(self.outer_scalars),
            "newest": self._newest,
        }

    def adopted(self, peer: str, number: int) -> None:
        """Say that a member takes the values of a round next: if it is the newest one, the member is awaited again."""
        if peer in self.members and number == self._newest:
            self.members[peer].awaited = True

    def await_everybody(self) -> None:
        """Say that this state was restored: who has taken the newest values since is not known, so all are awaited."""
        for member in self.members.values():
            member.awaited = True

    def _created_as_json(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "catalog": self.catalog,
            "peers": self.places,
            "rounds": self.rounds,
            "sharding": self.sharding,
            "kept_states": self.kept_states,
            "protocol": self.protocol,
        }

    def _recovered(self, event: Event) -> None:
        """Become what a state was that `as_json` has described, whatever this one is."""
        found = event["state"]
        if found["created"] is not None:
            self._created(found["created"])
        self.members = {entry["name"]: Member(**entry) for entry in found["members"]}
        self.publisher = found["publisher"]
        self.certificates = dict(found["certificates"])
        self.data = dict(found.get("data", ()))
        self.evicted = {peer: (instance, reason) for peer, instance, reason in found["evicted"]}
        self.uploaded = dict(found["uploaded"])
        self._reported = {peer: (index, Progress(*progress)) for peer, index, progress in found["reported"]}
        self._steps, self._batches = dict(found.get("steps", {})), dict(found.get("batches", {}))
        self.counted = {index: Progress(*progress) for index, progress in found["counted"]}
        self.closing = None if found["closing"] is None else tuple(found["closing"])
        self.results = {entry["number"]: RoundResult.from_json(entry) for entry in found["results"]}
        self.outer_scalars, self._newest = found["outer_scalars"], found["newest"]
        self._quorum_since = None

    def _created(self, event: Event) -> None:
        self.config, self.catalog, self.places = event["config"], event["catalog"], event["peers"]
        self.rounds, self.sharding = event.get("rounds", "synchronous"), event.get("sharding")
        self.kept_states, self.protocol = event.get("kept_states"), event.get("protocol")

    def _joined(self, event: Event) -> None:
        name = event["peer"]
        self.members[name] = Member(
            name=name,
            index=event["index"],
            instance=event["instance"],
            alive_seconds=event.get("alive_seconds", 0.0),
            data=event.get("data", ""),
        )
        if event.get("continue_run") and event["index"] in self.data:
            self.data[event["index"]] = event["data"]
        if "certificate" in event:
            self.certificates.setdefault(name, event["certificate"])
        self.evicted.pop(name, None)
        if self.publisher is None:
            self.publisher = name

    def _gone(self, event: Event) -> None:
        self.members.pop(event["peer"], None)
        if self.publisher == event["peer"] and not (self.open_round == 0 and self.uploaded):
            by_index = sorted(self.members.values(), key=lambda member: member.index)
            self.publisher = by_index[0].name if by_index else None

    def _evicted(self, event: Event) -> None:
        member = self.members.get(event["peer"])
        if member is not None:
            self.evicted[member.name] = (member.instance, event["reason"])
            self.certificates.pop(member.name, None)
        if self.closing is None or event.get("reopens"):
            self._drop_upload(event["peer"])
        if event.get("reopens"):
            self.closing = None
        self._gone(event)

    def _uploaded(self, event: Event) -> None:
        peer = event["peer"]
        self.uploaded[peer] = index = self.members[peer].index
        # Who has not contributed may have begun with the wrong data and start again; nothing is trained before round 1.
        if self.open_round and (data := self.members[peer].data):
            self.data[index] = data
        if event.get("steps"):
            self._steps[peer] = event["steps"]
        if "progress" in event:
            progress = Progress(*event["progress"])
            self._reported[peer] = index, progress
            if progress.batch:
                self._batches[peer] = progress.batch

    def _forgotten(self, event: Event) -> None:
        for peer in (event["peer"], *self.evicted):
            self._drop_upload(peer)
        self.closing = None

    def _drop_upload(self, peer: str) -> None:
        """Let a contribution to the open round not count."""
        self.uploaded.pop(peer, None)
        self._reported.pop(peer, None)

    def _closed(self, event: Event) -> None:
        self.closing = tuple(event["peers"])
        for member in self.members.values():
            member.awaited = member.name in self.closing
            member.missed = 0 if member.awaited else member.missed + 1
            # Whoever did not publish the start has nothing to catch up with.
            if event["round"] == 0:
                member.awaited, member.missed = True, 0

    def _committed(self, event: Event) -> None:
        self._newest = event["round"]
        self.results[self._newest] = RoundResult(
            number=self._newest,
            digest=event["digest"],
            contributors=tuple(event["contributors"]),
            rejected=dict(event["rejected"]),
            excluded=dict(event.get("excluded", {})),
            kept=tuple(event.get("kept", ())),
        )
        self.results.pop(self._newest - KEPT_RESULTS, None)
        for peer in (*event["contributors"], *event["rejected"]):
            # A peer whose contribution was refused continues after it, too.
            if peer in self._reported:
                index, progress = self._reported.pop(peer)
                self.counted[index] = progress
        self.outer_scalars = event["outer_scalars"]
        self.uploaded, self.closing, self._quorum_since = {}, None, None


def _evicted_because(peer: str, reason: str) -> str:
    return f"peer {peer!r} was evicted: {reason}; a new process of that name may register again"
