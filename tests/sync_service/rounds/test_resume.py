# SPDX-License-Identifier: Apache-2.0
"""The rule by which peers resume, case by case."""

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.sync_service.protocol.field_checks import LARGEST_COUNT
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.report import Progress
from megatron_ext.sync_service.protocol.resuming import KEPT_RESULTS, Adopt, Claim, Continue, Refuse, ResumeAnswer, Wait
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.members import Policy
from megatron_ext.sync_service.rounds.resume import Ledger, Recorded, decide
from megatron_ext.sync_service.rounds.round import RunState
from tests.sync_service.rounds.resume_history import BATCH, UNITS, at

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
    assert decide(NEWEST, Claim(begin=at(8), now=replace(at(8), batch=0))).place == at(8)
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
    assert decide(NEWEST, Claim(round=3, whole=True)).keeps_residuals is None  # it is adopted


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
