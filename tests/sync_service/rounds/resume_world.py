# SPDX-License-Identifier: Apache-2.0
"""A world of two places for peers and a server, in which any of them may end at any time."""

from dataclasses import replace

from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.resuming import Adopt, Claim, Continue, Refuse, ResumeAnswer, Wait
from megatron_ext.sync_service.rounds.members import Policy
from megatron_ext.sync_service.rounds.resume import decide
from tests.sync_service.rounds.resume_check import Check
from tests.sync_service.rounds.resume_history import BATCH, LONGEST, NOTHING, UNITS, Job, Process, Saved, Sent, at
from tests.sync_service.rounds.resume_server import Server


class World(Server):
    """Two places for peers, each a job of several ranks, and their server."""

    def __init__(
        self, *, is_asynchronous: bool, quorum: int, staleness: int | None, delay: int, by_time: bool, job: Job
    ) -> None:
        super().__init__(
            Policy(
                peers=2,
                quorum=1 if is_asynchronous else quorum,
                grace_seconds=0.0,
                is_asynchronous=is_asynchronous,
                max_staleness=staleness if is_asynchronous else None,
            )
        )
        self.delay, self.by_time, self.job = delay, by_time, job
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
        self.join("a", 0, None)
        self.record({"event": "uploaded", "round": 0, "peer": "a"})
        self.close(0)
        self.commit(0)
        self.processes[0] = None
        self.save_backup()

    # The server's side.

    def has_judged(self, index: int) -> None:
        process = self.processes[index]
        if process is not None and process.claim is None:
            self.faults[index] = 0

    def has_lost(self, index: int) -> None:
        self.faults[index] += 1

    def has_been_restored(self) -> None:
        self.processes = [None, None]
        self.faults = [1, 1]
        self.reached = [self.truth.end(index) or 0 for index in range(2)]
        self.floor = list(self.reached)

    # Peers.

    def join(self, name: str, index: int, saved: Saved | None, *, whole: bool = False, length: int = 2) -> None:
        self.instances += 1
        try:
            event = self.state.check_joining(name, f"process {self.instances}", index)
        except Refusal:
            return
        assert event is not None
        self.record(event)
        process = Process(name, index, saved, whole, length, not self.by_time, self.job, self.instances)
        if whole and saved is not None:
            process.residuals, process.lineage = dict(saved.residuals), saved.lineage
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
            process.residuals, process.lineage = dict.fromkeys(UNITS, NOTHING), self.instances
            return
        process.claim = None
        process.base, process.digest = answer.round, answer.digest
        if answer.place is not None:
            process.place(answer.place.iteration, 0)
        else:
            assert saved is not None
            process.place(saved.begin, saved.done)
        if isinstance(answer, Adopt) and answer.keeps_residuals is not None:
            process.residuals |= dict.fromkeys(set(UNITS) - answer.keeps_residuals, NOTHING)
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

    def step(self, index: int, dice: int) -> None:
        """Let one of the ranks make a step."""
        process = self.processes[index]
        if process is None or process.claim is not None:
            return
        rank = dice % process.job.size
        last = process.length if process.in_flight is None else min(self.delay, process.length)
        if process.steps[rank] < last:
            process.steps[rank] += 1
            self.reached[index] = max(self.reached[index], process.begin + process.done)

    def upload(self, index: int, dice: int) -> None:
        """Let one of the ranks send what it holds; the last one ends the contribution, without which it is nothing."""
        process = self.processes[index]
        if process is None or process.claim is not None or process.in_flight is not None:
            return
        if process.done < process.length:
            return
        process.uploaded.add(dice % process.job.size)
        if len(process.uploaded) < process.job.size:
            return
        begin, end = process.begin, process.begin + process.done
        sent = Sent(process.name, index, process.base + 1, begin, end, process.contribution(), process.lineage)
        process.place(end, 0)
        process.uploaded.clear()
        if self.by_time:
            process.length = self.length(dice)
        if process.is_recorded:
            recorded = self.truth.pending.get(process.name)
            assert recorded is None or recorded.is_made_again_by(sent), "another contribution is on record"
            process.in_flight, process.is_recorded = sent, False
        elif self.send(sent):
            process.in_flight = sent
        else:
            self.faults[index] += 1
            self.take(process, self.state.open_round - 1)

    def send(self, sent: Sent) -> bool:
        """Contribute; return whether it counts."""
        if not self.state.accepts(sent.name, sent.made_for):
            event = self.state.stale_event(sent.name, sent.made_for)
            if event is not None:
                self.record(event)
            return False
        progress = [sent.end, BATCH * sent.end, float(BATCH * sent.end), BATCH]
        report = {"steps": sent.end - sent.begin, "progress": progress}
        self.record({"event": "uploaded", "round": sent.made_for, "peer": sent.name, **report})
        self.truth.pending[sent.name] = sent
        return True

    def apply(self, index: int, _dice: int) -> None:
        process = self.processes[index]
        if process is None or process.in_flight is None:
            return
        sent = process.in_flight
        answer, _ = self.state.answer(process.name, sent.made_for, True)
        if answer == "upload":
            self.send(sent)
        elif answer == "committed":
            outcome = self.state.outcome(process.name, sent.made_for)
            process.in_flight = None
            if all((entry.sent.name, entry.sent.end) != (process.name, sent.end) for entry in self.truth.judged):
                self.faults[index] += 1  # it was lost, and too late when it came again
            if outcome is not None and process.name in outcome.contributors:
                counted_in = frozenset(UNITS) - set(outcome.excluded.get(process.name, ()))
                process.settle(sent, counted_in, self.history)
            elif outcome is None and not self.policy.is_asynchronous:
                process.residuals = dict.fromkeys(UNITS, NOTHING)  # it may have counted, too long ago to know
            own = outcome.number if outcome is not None and self.policy.is_asynchronous else -1
            self.take(process, own if own in self.kept else self.state.open_round - 1)

    def take(self, process: Process, number: int) -> None:
        process.base, process.digest = number, self.truth.digests[number]
        self.state.adopted(process.name, number)

    def save(self, index: int, _dice: int) -> None:
        process = self.processes[index]
        if process is None or process.claim is not None or process.in_flight is not None or process.uploaded:
            return
        process.place(process.begin, max(process.steps))  # they save after the same step
        self.reached[index] = max(self.reached[index], process.begin + process.done)
        place = (process.base, process.digest, process.begin, process.done)
        kept = dict(process.residuals), process.lineage
        self.saved[process.name] = Saved(process.name, index, *place, len(self.truth.judged), *kept)

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
