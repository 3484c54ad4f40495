# SPDX-License-Identifier: Apache-2.0
"""The rule by which peers resume, over a run in which everything ends at any time: peers, rounds, and the server."""

import json
import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megatron_ext.sync_service.protocol.field_checks import LARGEST_COUNT
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.report import Progress
from megatron_ext.sync_service.protocol.resuming import Adopt, Claim, Continue, Refuse, ResumeAnswer, Wait
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.members import Policy
from megatron_ext.sync_service.rounds.resume import Ledger, Recorded, decide
from megatron_ext.sync_service.rounds.round import KEPT_RESULTS, RunState

BATCH = 4
LONGEST = 3
"""Steps of an interval, at most."""

UNITS = ("u", "v")
KEPT = 3
"""Rounds whose values the server keeps."""


def at(steps: int) -> Progress:
    """Return how far a training is after a number of steps."""
    return Progress(iteration=steps, samples=BATCH * steps, schedule=float(BATCH * steps), batch=BATCH)


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    name: str
    index: int
    base: int
    digest: str
    begin: int
    done: int
    sent: int
    """How many contributions of this peer there had been."""


@dataclass
class Process:
    """A peer's process. Its training is as far as `begin + done`."""

    name: str
    index: int
    saved: Saved | None
    whole: bool
    length: int
    """Steps of this interval."""

    repeats: bool
    base: int = -1
    digest: str = ""
    begin: int = 0
    done: int = 0
    claim: Claim | None = None
    """Until it is decided."""

    is_recorded: bool = False
    """Whether an earlier process has contributed this interval, which is not sent again."""

    in_flight: tuple[int, int, int] | None = None
    """Round, begin and end of a contribution whose round is not applied yet."""


@dataclass(frozen=True)
class Sent:
    """What was contributed."""

    name: str
    index: int
    made_for: int
    begin: int
    end: int


@dataclass(frozen=True)
class Judged:
    """What became of that."""

    sent: Sent
    round: int
    counted_in: frozenset[str]
    """Units; none where it was rejected."""


@dataclass
class Truth:
    """What has happened in the history that the server has."""

    digests: list[str] = field(default_factory=list)
    pending: dict[str, Sent] = field(default_factory=dict)
    judged: list[Judged] = field(default_factory=list)

    def copy(self) -> "Truth":
        return Truth(list(self.digests), dict(self.pending), list(self.judged))

    def end(self, index: int) -> int | None:
        """Return where the last contribution of a part ended that was judged."""
        ends = [entry.sent.end for entry in self.judged if entry.sent.index == index]
        return ends[-1] if ends else None


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


class Check:
    """What an answer has to be, told from all that has happened and not from the ledger."""

    def __init__(self, world: World, process: Process, claim: Claim, answer: ResumeAnswer) -> None:
        self.world, self.process, self.claim, self.answer = world, process, claim, answer
        self.truth = world.truth
        self.newest = len(self.truth.digests) - 1
        self.end = self.truth.end(process.index)
        self.pending = self.truth.pending.get(process.name)
        if not claim.whole and self.is_contradiction:
            self.claim = replace(claim, round=0, digest="", begin=claim.now)

    def all(self) -> None:
        self.refusal()
        if not isinstance(self.answer, Refuse):
            self.waiting()
        if isinstance(self.answer, Continue):
            self.continuing(self.answer)
        if isinstance(self.answer, Adopt):
            self.adopting(self.answer)

    @property
    def is_of_this_history(self) -> bool:
        """Whether the claim's round is one that the server has made."""
        return self.claim.round <= self.newest and self.claim.digest in ("", self.truth.digests[self.claim.round])

    @property
    def still_counts(self) -> bool:
        """Whether what begins with the claim's values counts, and was not trained by anybody."""
        begin = self.claim.begin
        assert begin is not None
        if not self.is_of_this_history or (self.end is not None and begin.iteration < self.end):
            return False
        if not self.world.policy.is_asynchronous:
            return self.claim.round == self.newest
        is_kept = self.claim.round in self.world.kept
        return is_kept and not self.world.policy.is_stale(self.claim.round + 1, self.newest + 1)

    @property
    def is_contradiction(self) -> bool:
        """Whether the claim is of another history, as far as the server can tell."""
        claim = self.claim
        is_comparable = claim.round == self.newest or (
            self.world.policy.is_asynchronous
            and claim.round in self.world.kept
            and not self.world.policy.is_stale(claim.round + 1, self.newest + 1)
        )
        return claim.round > self.newest or (is_comparable and not self.is_of_this_history)

    def refusal(self) -> None:
        assert isinstance(self.answer, Refuse) == (self.claim.whole and self.is_contradiction)

    def waiting(self) -> None:
        state = self.world.state
        if state.is_made_without(self.process.name):
            assert self.answer == Wait(round=state.open_round), "its interval would come too late"
        elif self.pending is None:
            assert not isinstance(self.answer, Wait), "nothing is waited for"
        elif isinstance(self.answer, Wait):
            assert self.answer.round == self.pending.made_for
            # A process that can make it again does not wait.
            is_first = self.pending.made_for == 1 and self.pending.begin == 0 and self.process.saved is None
            is_same = is_first or (self.claim.whole and self.still_counts)
            assert not (is_same and self.is_the_recorded), "it would make it again"
        else:
            assert isinstance(self.answer, Continue) and not self.answer.send, "it would be sent twice"

    @property
    def is_the_recorded(self) -> bool:
        """Whether the claim leads to the contribution on record."""
        if self.pending is None or not self.claim.repeats or self.claim.steps is None or self.claim.begin is None:
            return False
        begin, pending = self.claim.begin.iteration, self.pending
        assert self.claim.now is not None
        if self.claim.whole and self.claim.now.iteration >= begin + self.claim.steps:
            return False
        made = (self.claim.round + 1, begin, begin + self.claim.steps)
        return self.still_counts and made == (pending.made_for, pending.begin, pending.end)

    def continuing(self, answer: Continue) -> None:
        assert answer.round == self.claim.round and answer.digest == self.truth.digests[answer.round]
        assert self.still_counts, "what it makes counts already, or will not count"
        assert answer.send == (self.pending is None)
        if not answer.send:
            assert self.is_the_recorded, "another interval is on record"
        assert (answer.place is None) == self.claim.whole
        if answer.place is not None:
            assert answer.place == self.claim.begin

    def adopting(self, answer: Adopt) -> None:
        assert (answer.round, answer.digest) == (self.newest, self.truth.digests[self.newest])
        assert not (self.claim.whole and self.still_counts and not self.was_judged), "its interval is lost for nothing"
        assert answer.place is not None
        assert answer.is_committed == (self.end is not None)
        if self.end is not None:
            assert answer.place == at(self.end), "samples are left out, or come twice"
        else:
            assert answer.place == self.claim.begin, "steps are left out that no round has"
        if self.claim.whole and self.is_of_this_history:
            self.residuals(answer)

    @property
    def since(self) -> list[Judged]:
        """What was made of the peer's contributions since the claim's round."""
        return [
            entry
            for entry in self.truth.judged
            if entry.sent.name == self.process.name and entry.round > self.claim.round
        ]

    @property
    def was_judged(self) -> bool:
        return any(entry.sent.made_for > self.claim.round for entry in self.since)

    def residuals(self, answer: Adopt) -> None:
        brought = {unit for entry in self.since for unit in entry.counted_in}
        kept = set(UNITS) if answer.keeps_residuals is None else set(UNITS) & answer.keeps_residuals
        assert not kept & brought, "what has come is sent again"
        if self.newest - self.claim.round < KEPT_RESULTS:
            assert kept == set(UNITS) - brought, "what has not come is lost"


FAULTS = (*["crash"] * 12, "evict", "leave")
FAULTS_OF_SERVER = ("forget", "forget", "restart_server", "save_backup", "restore_backup")


def next_of(process: Process | None, dice: random.Random) -> str:
    """Return what a peer does next if nothing happens to it."""
    if process is None:
        return "begin"
    if process.claim is not None:
        return "ask"
    if process.in_flight is not None:
        return dice.choice(["step", "apply"])
    if dice.random() < 0.15:
        return "save"
    return "upload" if process.done >= process.length else "step"


def walk(seed: int, length: int) -> World:
    """Let things happen at random."""
    dice = random.Random(seed)
    world = World(
        is_asynchronous=dice.random() < 0.5,
        quorum=dice.choice([1, 2]),
        staleness=dice.choice([None, 1]),
        delay=dice.choice([0, 1]),
        by_time=dice.random() < 0.25,
    )
    for _ in range(length):
        index, kind = dice.randrange(2), dice.random()
        if kind < 0.02:
            verb, places = dice.choice(FAULTS_OF_SERVER), tuple[int, ...]()
        elif kind < 0.2:
            verb, places = dice.choice(["close", "commit"]), ()
        else:
            verb = dice.choice(FAULTS) if kind < 0.26 else next_of(world.processes[index], dice)
            places = (index,)
        try:
            getattr(world, verb)(*places, dice.randrange(1 << 10))
        except Refusal as refusal:
            assert refusal.reason == "later", refusal  # an earlier contribution is not used yet
    return world


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_whatever_ends_no_sample_counts_twice_and_no_fault_loses_more_than_an_interval(first: int):
    answers: list[ResumeAnswer] = []
    for seed in range(first, first + 100):
        try:
            answers += walk(seed, 600).answers
        except AssertionError as error:
            raise AssertionError(f"walk {seed}: {error}") from error
    # What is to be seen is there.
    for kind in (Wait, Adopt, Refuse):
        assert sum(isinstance(answer, kind) for answer in answers) > 20, kind
    for send in (True, False):
        assert sum(isinstance(answer, Continue) and answer.send == send for answer in answers) > 20, send


NEWEST = Ledger(run="demo", newest=4, bases={4: "d4"})


def continued(*, send: bool) -> Continue:
    return Continue(send=send, round=4, digest="d4")


def test_claims_without_samples_are_compared_by_their_rounds():
    claim, recorded = Claim(round=4, whole=True), Recorded(made_for=5)
    assert decide(NEWEST, claim) == continued(send=True)
    there = replace(NEWEST, recorded=recorded)
    assert decide(there, claim) == continued(send=False)
    assert decide(replace(there, end=at(8)), claim) == continued(send=False)
    assert decide(there, replace(claim, repeats=False)) == Wait(round=5)
    assert decide(there, replace(claim, round=3)) == Wait(round=5)
    # Whoever makes rounds alone may have begun an interval after any of them, and has been judged alone.
    assert decide(replace(there, is_asynchronous=True), claim) == Wait(round=5)
    alone = replace(NEWEST, is_asynchronous=True, bases={3: "d3", 4: "d4"})
    assert decide(alone, replace(claim, round=3)) == Continue(send=True, round=3, digest="d3")
    assert decide(replace(alone, used=3), replace(claim, round=3)) == Continue(send=True, round=3, digest="d3")
    assert isinstance(decide(replace(alone, used=4), replace(claim, round=3)), Adopt)
    adopted = Adopt(round=4, digest="d4", place=None, is_committed=False, keeps_residuals=None)
    assert decide(NEWEST, Claim()) == adopted
    assert decide(replace(NEWEST, newest=0, bases={0: "d0"}), Claim()) == replace(adopted, round=0, digest="d0")


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_an_interval_on_record_is_made_again_if_it_begins_and_ends_where_the_claim_does(is_asynchronous: bool):
    claim = Claim(round=4, whole=True, begin=at(8), steps=2, now=at(9))
    ledger = replace(NEWEST, is_asynchronous=is_asynchronous, end=at(8))

    def answer(steps: int, end: int, now: int = 9) -> ResumeAnswer:
        there = replace(ledger, recorded=Recorded(made_for=5, steps=steps, end=at(end)))
        return decide(there, replace(claim, now=at(now)))

    assert answer(2, 10) == continued(send=False)
    assert answer(2, 10, now=10) == answer(2, 10, now=11) == Wait(round=5)  # the checkpoint is of a longer interval
    assert answer(3, 10) == answer(2, 11) == answer(2, 9) == Wait(round=5)
    other_batch = replace(claim, begin=Progress(4, 8 * BATCH, 8.0 * BATCH, 2 * BATCH), steps=1)
    assert decide(replace(ledger, recorded=Recorded(made_for=5, steps=1, end=at(10))), other_batch) == Wait(round=5)


@pytest.mark.parametrize("is_asynchronous", [True, False])
@pytest.mark.parametrize("done", [0, 1])
def test_a_schedule_that_stood_still_in_a_step_does_not_make_another_interval(is_asynchronous: bool, done: int):
    # Megatron steps no schedule in a step whose update it skips, as that of a loss scale that is too high.
    behind = replace(at(10), schedule=at(9).schedule)
    recorded = Recorded(made_for=5, steps=2, end=behind)
    ledger = replace(NEWEST, is_asynchronous=is_asynchronous, end=at(8), recorded=recorded)
    claim = Claim(round=4, whole=True, begin=at(8), steps=2, now=at(8 + done))
    assert decide(ledger, claim) == continued(send=False)
    fewer = replace(ledger, recorded=replace(recorded, end=replace(behind, samples=behind.samples - BATCH)))
    assert decide(fewer, claim) == Wait(round=5)


def test_weights_alone_are_compared_by_their_schedule_too_as_far_as_floats_are_exact():
    claim = Claim(digest="d0", steps=2, begin=replace(at(0), schedule=0.1), now=at(0))
    ledger = Ledger(run="demo", newest=0, bases={0: "d0"})

    def answer(schedule: float) -> ResumeAnswer:
        end = replace(at(2), schedule=schedule)
        return decide(replace(ledger, recorded=Recorded(made_for=1, steps=2, end=end)), claim)

    for schedule in (8.1, 8.1 + 1e-14):
        assert answer(schedule) == Continue(send=False, round=0, digest="d0", place=claim.begin)
    assert answer(4.1) == answer(8.101) == Wait(round=1)


def test_weights_alone_make_the_first_interval_again_and_no_other():
    first = Ledger(run="demo", newest=0, bases={0: "d0"}, recorded=Recorded(made_for=1, steps=2, end=at(2)))
    claim = Claim(digest="d0", steps=2, begin=at(0), now=at(2))
    assert decide(first, claim) == Continue(send=False, round=0, digest="d0", place=at(0))
    later = replace(NEWEST, end=at(8), recorded=Recorded(made_for=5, steps=2, end=at(10)))
    assert decide(later, replace(claim, round=4, digest="d4", begin=at(8))) == Wait(round=5)


def test_before_the_common_start_that_is_awaited():
    nothing = Ledger(run="demo", newest=-1, bases={})
    assert decide(nothing, Claim(begin=at(0), now=at(0))) == Wait(round=0)
    answer = decide(nothing, Claim(whole=True))
    assert isinstance(answer, Refuse) and "the newest one of run 'demo' on the server is none" in answer.why


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (Claim(round=5, whole=True), "resumes from round 5, but the newest one of run 'demo' on the server is 4: the"),
        (Claim(round=4, digest="e4", whole=True), "round 4 with the digest e4, but those of run 'demo' .* have d4"),
    ],
)
def test_what_contradicts_the_server_is_refused_with_the_way_out(claim: Claim, said: str):
    answer = decide(NEWEST, claim)
    assert isinstance(answer, Refuse) and re.search(said, answer.why)
    assert "begin a run under another name" in answer.why
    # Weights of another history are taken as a start, where their steps stay made.
    start = decide(NEWEST, replace(claim, whole=False, begin=at(8), now=at(9)))
    assert isinstance(start, Adopt) and start.place == at(9)


@pytest.mark.parametrize("digest", ["a" * 65, "a b", "a\n"])
def test_what_no_digest_looks_like_is_refused(digest: str):
    with pytest.raises(Refusal, match=f"claim.digest has {len(digest)} letters"):
        Claim.of(pb2.Claim(digest=digest))


def test_weights_of_an_earlier_round_are_of_this_history():
    for claim in (Claim(round=3, digest="d3"), Claim(round=4, digest="d4"), Claim(round=4)):
        answer = decide(NEWEST, replace(claim, begin=at(8), now=at(9)))
        assert isinstance(answer, Adopt) and answer.place == at(8)


def test_a_place_is_counted_in_the_batches_of_the_claim():
    ledger = replace(NEWEST, end=at(8))

    def answer(batch: int) -> ResumeAnswer:
        return decide(ledger, Claim(now=replace(at(0), batch=batch)))

    for batch, iteration in ((BATCH, 8), (2 * BATCH, 4), (BATCH // 2, 16)):
        found = answer(batch)
        assert isinstance(found, Adopt) and found.is_committed
        assert found.place == Progress(iteration, 8 * BATCH, 8.0 * BATCH, batch)
    refused = answer(3 * BATCH)
    assert isinstance(refused, Refuse)
    assert "--global-batch-size 12: this peer's part of the samples is trained up to iteration 8 of 4" in refused.why
    assert "give 4, or a size that divides 32" in refused.why
    unsaid = decide(replace(NEWEST, end=replace(at(8), batch=0)), Claim(now=at(0)))
    assert isinstance(unsaid, Adopt) and unsaid.place == at(8)
    assert decide(NEWEST, Claim(begin=at(8), now=replace(at(8), batch=0))).place == at(8)  # type: ignore[union-attr]
    most = decide(replace(NEWEST, end=Progress(LARGEST_COUNT, 0, 0.0, 8)), Claim(now=replace(at(0), batch=1)))
    assert isinstance(most, Refuse)


def test_residuals_stay_for_what_no_contribution_since_has_counted_in():
    def keeps_residuals(claim: int, forgotten: int = -1) -> frozenset[str] | None:
        counted = {2: frozenset(UNITS), 3: frozenset({"u"}), 4: frozenset({"u", "v"})}
        answer = decide(replace(NEWEST, counted=counted, forgotten=forgotten), Claim(round=claim, whole=True))
        assert isinstance(answer, Adopt)
        return answer.keeps_residuals

    assert keeps_residuals(3) == {"u", "v"} and keeps_residuals(2) == keeps_residuals(1) == {"u"}
    assert keeps_residuals(2, forgotten=2) == {"u"} and keeps_residuals(2, forgotten=3) == frozenset()
    assert decide(NEWEST, Claim(round=3, whole=True)).keeps_residuals is None  # type: ignore[union-attr]  # it is adopted


def committed(state: RunState, contributors: tuple[str, ...], **more: Any) -> None:
    """Make the open round of a state."""
    made = {"contributors": contributors, "rejected": {}, "digest": f"d{state.open_round}", "outer_scalars": {}}
    closing = {"made_for": state.open_round, "weight": 1.0, "peers": contributors}
    for event in ({"event": "closed", **closing}, {"event": "committed", **made, **more}):
        state.apply({"round": state.open_round, **event})


@pytest.mark.parametrize("kind", [RunState, AsynchronousState])
def test_the_ledger_says_what_it_has_forgotten(kind: type[RunState]):
    state = kind(Policy(peers=2, quorum=1, grace_seconds=0.0, is_asynchronous=kind is AsynchronousState))
    for index, name in enumerate("ab"):
        state.apply({"event": "joined", "peer": name, "index": index, "instance": name})

    def contribute(name: str, **more: Any) -> None:
        state.apply({"event": "uploaded", "peer": name, "round": state.open_round})
        committed(state, (name,), **more)

    def ledger() -> Ledger:
        return state.ledger("demo", "a", range(state.open_round))

    def keeps(claim: int) -> frozenset[str] | None:
        answer = decide(replace(ledger(), bases={state.open_round - 1: ""}), Claim(round=claim, whole=True))
        assert isinstance(answer, Adopt)
        return answer.keeps_residuals

    contribute("a")
    contribute("b")
    contribute("a", excluded={"a": {"u": "why"}})
    for _ in range(KEPT_RESULTS - 1):
        contribute("b")
    # Round 2 is the oldest one that is remembered, and what has counted in it.
    assert state.open_round - 1 == KEPT_RESULTS + 1
    assert keeps(1) == {"u"} and keeps(2) is None
    contribute("b")
    contribute("b")
    # Who makes rounds alone has its last one remembered, and is known to have made none since.
    alone = kind is AsynchronousState
    assert ledger().used == (2 if alone else -1)
    assert keeps(1) == ({"u"} if alone else frozenset()) and keeps(0) == frozenset()
    assert keeps(2) == (None if alone else frozenset()) and keeps(3) is None
