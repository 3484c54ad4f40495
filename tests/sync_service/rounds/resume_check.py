# SPDX-License-Identifier: Apache-2.0
"""Holds the server's answer to a peer that resumes against what has happened."""

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.sync_service.protocol.resuming import (
    KEPT_RESULTS,
    Adopt,
    Claim,
    Continue,
    Refuse,
    ResumeAnswer,
    Wait,
)
from tests.sync_service.rounds.resume_history import UNITS, Judged, Process, at

if TYPE_CHECKING:
    from tests.sync_service.rounds.resume_world import World


class Check:
    """What an answer has to be, told from all that has happened and not from the ledger."""

    def __init__(self, world: "World", process: Process, claim: Claim, answer: ResumeAnswer) -> None:
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
