# SPDX-License-Identifier: Apache-2.0
"""A world of two places for peers and a server, in which any of them may end at any time."""

import json
from dataclasses import replace
from typing import Any

from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.resuming import Claim, Continue, Refuse, ResumeAnswer, Wait
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.members import Policy
from megatron_ext.sync_service.rounds.resume import decide
from megatron_ext.sync_service.rounds.round import RunState
from tests.sync_service.rounds.resume_check import Check
from tests.sync_service.rounds.resume_history import (
    BATCH,
    KEPT,
    LONGEST,
    UNITS,
    Judged,
    Process,
    Saved,
    Sent,
    Truth,
    at,
)


class World:
    """Two places for peers, and a server whose state machine and journal are the real ones."""

    def __init__(self, *, is_asynchronous: bool, quorum: int, staleness: int | None, delay: int, by_time: bool) -> None:
        self.policy = Policy(
            peers=2,
            quorum=1 if is_asynchronous else quorum,
            grace_seconds=0.0,
            is_asynchronous=is_asynchronous,
            max_staleness=staleness if is_asynchronous else None,
        )
        self.delay, self.by_time = delay, by_time
        self.journal: list[dict[str, Any]] = []
        self.state = self.replayed()
        self.truth = Truth()
        self.backup: tuple[list[dict[str, Any]], Truth] = ([], Truth())
        self.history = 0
        self.instances = 0
        self.processes: list[Process | None] = [None, None]
        self.saved: dict[str, Saved] = {}
        self.faults = [0, 0]
        """Of a place since something of it was judged, or begun again."""
        self.reached = [0, 0]
        """How far a part has been trained in this history."""
        self.floor = [0, 0]
        """Where that has begun again."""
        self.answers: list[ResumeAnswer] = []
        self.record({"event": "created", "config": {"codec": "fp32"}, "catalog": [], "peers": 2})
        self.join("a", 0, None)
        self.record({"event": "uploaded", "round": 0, "peer": "a"})
        self.close(0)
        self.commit(0)
        self.processes[0] = None
        self.save_backup()

    # The server.

    def replayed(self) -> RunState:
        state = (AsynchronousState if self.policy.is_asynchronous else RunState)(self.policy)
        for event in self.journal:
            state.apply(event)
        state.await_everybody()
        return state

    def record(self, event: dict[str, Any]) -> None:
        self.journal.append(json.loads(json.dumps(event)))
        self.state.apply(self.journal[-1])

    @property
    def kept(self) -> range:
        newest = self.state.open_round - 1
        return range(max(0, newest - KEPT + 1), newest + 1)

    def close(self, _dice: int) -> None:
        if self.state.closing is None and self.state.seconds_until_close(0.0) == 0:
            self.record(self.state.closing_event())

    def commit(self, dice: int) -> None:
        closing, number = self.state.closing, self.state.open_round
        if closing is None:
            return
        rejected = {name: "why" for place, name in enumerate(closing) if number and dice >> place & 7 == 7}
        excluded = {name: {"u": "why"} for place, name in enumerate(closing) if dice >> (3 + place) & 3 == 3}
        digest = f"{self.history}x{number}"
        counted = [name for name in closing if name not in rejected]
        excluded = {name: units for name, units in excluded.items() if name in counted}
        made = {"contributors": counted, "rejected": rejected, "excluded": excluded, "digest": digest}
        self.record({"event": "committed", "round": number, "outer_scalars": {}, **made})
        self.truth.digests.append(digest)
        for name in closing if number else ():
            sent = self.truth.pending.pop(name)
            units = frozenset(UNITS) - set(excluded.get(name, ())) if name in counted else frozenset[str]()
            for before in self.truth.judged:
                twice = (
                    before.sent.index == sent.index and before.sent.end > sent.begin and before.sent.begin < sent.end
                )
                assert not (twice and units and before.counted_in), "samples count twice"
            self.truth.judged.append(Judged(sent, number, units))
            process = self.processes[sent.index]
            if process is not None and process.claim is None:
                self.faults[sent.index] = 0

    def forget(self, dice: int) -> None:
        """Lose a contribution on the disk."""
        names = [name for name in self.state.uploaded if name in self.truth.pending]
        if names and self.state.closing is None:
            self.lose(names[dice % len(names)])

    def lose(self, name: str) -> None:
        sent = self.truth.pending.pop(name)
        self.record({"event": "forgotten", "round": sent.made_for, "peer": name, "reason": ""})
        self.faults[sent.index] += 1

    def restart_server(self, _dice: int) -> None:
        self.state = self.replayed()

    def save_backup(self, _dice: int = 0) -> None:
        self.backup = list(self.journal), self.truth.copy()

    def restore_backup(self, dice: int) -> None:
        """Restore the server's folder from an older copy, with which all peers are started again."""
        journal, truth = self.backup
        self.journal, self.truth = list(journal), truth.copy()
        self.history += 1
        self.state = self.replayed()
        self.processes = [None, None]
        self.faults = [1, 1]
        self.reached = [self.truth.end(index) or 0 for index in range(2)]
        self.floor = list(self.reached)
        for name in list(self.truth.pending):
            if dice % 2 and self.state.closing is None:
                self.lose(name)

    # Peers.

    def join(self, name: str, index: int, saved: Saved | None, *, whole: bool = False, length: int = 2) -> None:
        self.instances += 1
        try:
            event = self.state.check_joining(name, f"process {self.instances}", index)
        except Refusal:
            return
        assert event is not None
        self.record(event)
        process = Process(name, index, saved, whole, length, repeats=not self.by_time)
        begin = 0 if saved is None else saved.begin
        now = begin + (0 if saved is None else saved.done)
        process.claim = Claim(
            round=0 if saved is None else saved.base,
            digest="" if saved is None else saved.digest,
            whole=whole,
            repeats=process.repeats,
            begin=at(begin),
            steps=length if process.repeats else None,
            now=at(now),
        )
        self.processes[index] = process

    def begin(self, index: int, dice: int) -> None:
        """Start a process: from a checkpoint, from its weights or another peer's, or from nothing."""
        if self.processes[index] is not None or dice % 4 == 3:
            return
        name = "ab"[index] if dice & 8 or not dice & 16 else "cd"[index]
        saved = None if dice % 4 == 2 else self.saved.get(name)
        whole = saved is not None and dice % 4 == 0
        if dice % 4 == 1 and dice & 32:
            saved = self.saved.get("ba"[index])  # another peer's weights
        self.join(name, index, saved, whole=whole, length=self.length(dice >> 6))

    def length(self, dice: int) -> int:
        """Return how many steps an interval has: where peers do not wait for each other, each has its own number."""
        return 1 + dice % LONGEST if self.by_time or self.policy.is_asynchronous else 2

    def ask(self, index: int, _dice: int) -> None:
        """Let the server decide where a process resumes, and hold it against what has happened."""
        process = self.processes[index]
        if process is None or process.claim is None:
            return
        ledger = self.state.ledger("demo", process.name, self.kept)
        claim, saved = process.claim, process.saved
        answer = decide(ledger, claim)
        self.answers.append(answer)
        Check(self, process, claim, answer).all()
        if isinstance(answer, Wait):
            return
        if isinstance(answer, Refuse):
            # The way out: the same checkpoint, without its optimizer.
            process.claim, process.whole = replace(claim, whole=False), False
            return
        process.claim = None
        process.base, process.digest = answer.round, answer.digest
        if answer.place is not None:
            process.begin, process.done = answer.place.iteration, 0
        else:
            assert saved is not None
            process.begin, process.done = saved.begin, saved.done
        process.is_recorded = isinstance(answer, Continue) and not answer.send
        reached = process.begin + process.done
        if process.is_recorded:
            reached = self.truth.pending[process.name].end
        lost = self.reached[index] - max(reached, self.floor[index])
        assert lost <= LONGEST * self.faults[index], "more than an interval is lost by a fault"
        if process.begin > self.reached[index]:
            self.floor[index] = process.begin
        self.reached[index] = reached
        if answer.place is not None and not process.is_recorded:
            # What was lost is accounted for.
            self.floor[index], self.faults[index] = reached, 0

    def step(self, index: int, _dice: int) -> None:
        process = self.processes[index]
        if process is None or process.claim is not None or process.done >= process.length:
            return
        if process.in_flight is not None and process.done == self.delay:
            return
        process.done += 1
        self.reached[index] = max(self.reached[index], process.begin + process.done)

    def upload(self, index: int, dice: int) -> None:
        process = self.processes[index]
        if process is None or process.claim is not None or process.in_flight is not None:
            return
        if process.done < process.length:
            return
        begin, end, number = process.begin, process.begin + process.done, process.base + 1
        process.begin, process.done = end, 0
        if self.by_time:
            process.length = self.length(dice)
        if process.is_recorded:
            sent = self.truth.pending.get(process.name)
            assert sent is None or (sent.begin, sent.end) == (begin, end), "another interval is on record"
            process.in_flight, process.is_recorded = (number, begin, end), False
        elif self.send(process, number, begin, end):
            process.in_flight = number, begin, end
        else:
            self.faults[index] += 1
            self.take(process, self.state.open_round - 1)

    def send(self, process: Process, number: int, begin: int, end: int) -> bool:
        """Contribute; return whether it counts."""
        if not self.state.accepts(process.name, number):
            event = self.state.stale_event(process.name, number)
            if event is not None:
                self.record(event)
            return False
        report = {"steps": end - begin, "progress": [end, BATCH * end, float(BATCH * end), BATCH]}
        self.record({"event": "uploaded", "round": number, "peer": process.name, **report})
        self.truth.pending[process.name] = Sent(process.name, process.index, number, begin, end)
        return True

    def apply(self, index: int, _dice: int) -> None:
        process = self.processes[index]
        if process is None or process.in_flight is None:
            return
        number, begin, end = process.in_flight
        answer, _ = self.state.answer(process.name, number, True)
        if answer == "upload":
            self.send(process, number, begin, end)
        elif answer == "committed":
            outcome = self.state.outcome(process.name, number) if self.policy.is_asynchronous else None
            newest = self.state.open_round - 1
            process.in_flight = None
            if all((entry.sent.name, entry.sent.end) != (process.name, end) for entry in self.truth.judged):
                self.faults[index] += 1  # it was lost, and too late when it came again
            self.take(process, outcome.number if outcome is not None and outcome.number in self.kept else newest)

    def take(self, process: Process, number: int) -> None:
        process.base, process.digest = number, self.truth.digests[number]
        self.state.adopted(process.name, number)

    def save(self, index: int, _dice: int) -> None:
        process = self.processes[index]
        if process is None or process.claim is not None or process.in_flight is not None:
            return
        place = (process.base, process.digest, process.begin, process.done)
        self.saved[process.name] = Saved(process.name, index, *place, len(self.truth.judged))

    def crash(self, index: int, _dice: int) -> None:
        if self.processes[index] is not None:
            self.processes[index] = None
            self.faults[index] += 1

    def end_membership(self, index: int, kind: str) -> None:
        members = [member.name for member in self.state.members.values() if member.index == index]
        for name in members:
            self.record({"event": kind, "peer": name, "reason": ""})
            self.faults[index] += 1
            if name not in self.state.uploaded and self.truth.pending.pop(name, None) is not None:
                self.faults[index] += 1
        self.processes[index] = None

    def evict(self, index: int, _dice: int) -> None:
        self.end_membership(index, "evicted")

    def leave(self, index: int, _dice: int) -> None:
        self.end_membership(index, "left")
