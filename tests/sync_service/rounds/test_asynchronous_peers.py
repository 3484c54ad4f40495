# SPDX-License-Identifier: Apache-2.0
"""Peers in asynchronous rounds: nobody waits for another, and who comes back late resumes with what still counts."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_ext.errors import UserError
from tests.support.waiting import until
from tests.sync_service.rounds.asynchronous_runs import ASYNC, begin
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import digest, start_values, trained

MakeService = Callable[..., Service]


def test_a_fast_peer_does_not_wait_for_a_slow_one(make_service: MakeService):
    service = make_service(peers=2, **ASYNC)
    service.start()
    slow_pauses = {str(number): 1.5 for number in range(1, 40)}
    slow = service.peer("slow", 12, pauses=slow_pauses, options={"index": 1})
    until(lambda: service.events("committed"), "the start")
    fast = service.peer("fast", 12, options={"index": 0})
    assert (fast.wait(), slow.wait()) == (0, 0), slow.output
    made = [event["contributors"][0] for event in service.events("committed")[1:]]
    assert made.count("fast") > 2 * made.count("slow") > 0
    # Both have ended with values that the server's journal has the digest of.
    digests = {event["round"]: event["digest"] for event in service.events("committed")}
    for name in ("fast", "slow"):
        assert all(line["digest"] == digests[number] for number, line in service.seen(name).items())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_peer_continues_from_what_its_own_contribution_gave(make_service: MakeService, shards: int):
    service = make_service(peers=2, **ASYNC)
    begin(service, shards)
    start = start_values(7)
    with service.client("p0", start) as first, service.client("p1", start) as other:
        first.start(start)
        other.start(start)
        sent = [trained(start, index, 1) for index in range(2)]
        first.upload(1, sent[0])
        other.upload(1, sent[1])
        until(lambda: len(service.events("committed")) == 3, "both rounds")
        # So that what a peer computes depends on the order in the journal alone.
        assert first.fetch(1, sent[0]).number == 1 and other.fetch(1, sent[1]).number == 2


@pytest.mark.parametrize("shards", [1, 3])
def test_a_peer_that_was_away_resumes_in_mid_interval_and_counts_once(make_service: MakeService, shards: int):
    service = make_service(peers=2, **ASYNC)
    service.extra = {"keep_snapshots": 3}
    begin(service, shards)
    start = start_values(7)
    with ExitStack() as stack:
        first, other = (stack.enter_context(service.client(name, start)) for name in ("p0", "p1"))
        first.start(start)
        values = other.start(start)
        for _ in range(2):
            values = other.sync(trained(values, 1, 1)).values
        again = stack.enter_context(service.client("p0", start))
        # Round 0 is still kept: nothing is lost of the interval that began with it.
        assert again.resume(0) is None and again.round == 0
        assert again.upload(1, trained(start, 0, 1))
        third = stack.enter_context(service.client("p0", start))
        # The process before has contributed already; this one continues from what came of it.
        taken = third.resume(0)
        assert taken is not None and third.round == 3
        assert digest(taken) == service.events("committed")[3]["digest"]
        for _ in range(3):
            values = other.sync(trained(values, 1, 1)).values
        late = stack.enter_context(service.client("p0", start))
        assert digest(late.resume(3)) == service.events("committed")[6]["digest"] and late.round == 6
    contributed = [(event["contributors"], event["made_for"]) for event in service.events("committed")[1:]]
    assert contributed == [(["p1"], 1), (["p1"], 2), (["p0"], 1), (["p1"], 3), (["p1"], 5), (["p1"], 6)]


def test_a_peer_does_not_continue_from_values_that_are_too_old_to_count(make_service: MakeService):
    service = make_service(peers=2, max_staleness=1, **ASYNC)
    service.extra = {"keep_snapshots": 10}
    service.start()
    start = start_values(7)
    with ExitStack() as stack:
        slow, fast = (stack.enter_context(service.client(name, start)) for name in ("slow", "fast"))
        values, held = slow.start(start), fast.start(start)
        slow.sync(trained(values, 0, 1))
        for _ in range(2):
            held = fast.sync(trained(held, 1, 1)).values
        # Round 1 was its own, and after two others nothing counts that begins there.
        after = stack.enter_context(service.client("slow", start))
        assert digest(after.resume(0)) == digest(held) and after.round == 3
        held = fast.sync(trained(held, 1, 1)).values
        within = stack.enter_context(service.client("slow", start))
        assert within.resume(3) is None
        for _ in range(2):
            held = fast.sync(trained(held, 1, 1)).values
        late = stack.enter_context(service.client("slow", start))
        assert digest(late.resume(3)) == digest(held) and late.round == 6


def test_whose_round_is_dropped_before_it_is_downloaded_takes_the_newest_one(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
):
    service = make_service(peers=2, **ASYNC)
    service.extra = {"keep_snapshots": 2}
    service.start()
    start = start_values(7)
    with ExitStack() as stack:
        slow, fast = (stack.enter_context(service.client(name, start)) for name in ("slow", "fast"))
        slow.start(start)
        held = [fast.sync(trained(fast.start(start), 1, 1)).values]
        take, asked = slow._take, []

        def late_take(number: int, *args: Any) -> Any:
            asked.append(number)
            for _ in range(3 if len(asked) == 1 else 0):
                held.append(fast.sync(trained(held[-1], 1, 1)).values)
            return take(number, *args)

        monkeypatch.setattr(slow, "_take", late_take)
        outcome = slow.sync(trained(start, 0, 1))
        assert asked == [2, 5] and outcome.contributed and outcome.number == 5
        assert digest(outcome.values) == digest(held[-1])
        # Its next contribution is sent as any other.
        assert slow.sync(trained(outcome.values, 0, 1)).contributed
    contributed = [(event["contributors"], event["made_for"]) for event in service.events("committed")[1:]]
    others = [(["fast"], number) for number in (2, 4, 5)]
    assert contributed == [(["fast"], 1), (["slow"], 1), *others, (["slow"], 6)]


def test_who_published_the_start_begins_again_with_the_newest_round(make_service: MakeService):
    service = make_service(peers=2, **ASYNC)
    service.start()
    start = start_values(7)
    with service.client("p0", start) as publishing:
        publishing.start(start)
    with service.client("p1", start) as other:
        values = other.sync(trained(other.start(start), 1, 1)).values
    with service.client("p0", start) as again:
        assert digest(again.start(start_values(1))) == digest(values) and again.round == 1


@pytest.mark.parametrize("shards", [1, 3])
def test_what_is_too_old_or_non_finite_does_not_count_and_a_late_peer_begins_with_the_newest(
    make_service: MakeService, shards: int
):
    service = make_service(peers=3, max_staleness=1, **ASYNC)
    service.extra = {"keep_snapshots": 5}
    begin(service, shards)
    start = start_values(7)
    with ExitStack() as stack:
        fast, slow, late = (stack.enter_context(service.client(name, start)) for name in ("fast", "slow", "late"))
        values = fast.start(start)
        slow.start(start)
        for _ in range(2):
            values = fast.sync(trained(values, 0, 1)).values
        outcome = slow.sync(trained(start, 1, 1))
        assert not outcome.contributed and "max_staleness is 1" in outcome.message and outcome.number == 2
        assert digest(outcome.values) == digest(values) == digest(late.start(start_values(1)))
        spoiled = {name: value.clone() for name, value in outcome.values.items()}
        spoiled["scale"].fill_(float("nan"))
        outcome = slow.sync(spoiled)
        assert not outcome.contributed and "non-finite" in outcome.message
        assert digest(outcome.values) == digest(values)
        assert late.sync(trained(values, 2, 3)).contributed
    kinds = [(event["peer"], event["round"]) for event in service.events("stale")]
    assert kinds == [("slow", 1)]


def test_what_does_not_fit_asynchronous_rounds_is_refused(make_service: MakeService):
    service = make_service(peers=2, step_weights=True, **ASYNC)
    service.start()
    start = {"w": torch.zeros(4)}
    with service.client("p0", start, agreed={"--sync-service-interval": "4"}) as client:
        values = client.start(start)
        with pytest.raises(UserError, match="step_weights of the run needs the steps of the interval"):
            client.sync(values)
    # How long an interval is, is every peer's own affair.
    with service.client("p1", start, agreed={"--sync-service-interval": "7"}) as client:
        client.register()


def test_a_run_keeps_the_kind_of_its_rounds(make_service: MakeService):
    service = make_service(peers=1, **ASYNC)
    service.start()
    with service.client("p0", start_values(1)) as client:
        client.start(start_values(1))
    service.server.kill()
    service.server.wait()
    service.runs["demo"].pop("rounds")
    service.start()
    assert service.server.wait() == 2
    assert "rounds is synchronous, but the run was started with asynchronous" in service.output
