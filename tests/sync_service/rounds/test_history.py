# SPDX-License-Identifier: Apache-2.0
"""What people are told of the past of a run, and whether it is well."""

from typing import Any

import pytest

from megatron_ext.sync_service.rounds.history import KEPT_ROUNDS, History
from megatron_ext.sync_service.status_page.health import health_of


def committed(number: int, **more: Any) -> dict[str, Any]:
    event = {"event": "committed", "round": number, "time": 100.0 + 10 * number, "contributors": ["a", "b"]}
    return {**event, "rejected": {}, "norms": {"a": 1.0, "b": 2.0}, "bytes": 80, "seconds": 0.5, **more}


def uploaded(peer: str, number: int, **more: Any) -> dict[str, Any]:
    return {"event": "uploaded", "round": number, "peer": peer, "time": 99.0 + 10 * number, "bytes": 40, **more}


def history_of(*events: dict[str, Any]) -> History:
    history = History()
    for event in events:
        history.apply(event)
    return history


def test_a_round_says_what_its_peers_have_reported():
    history = history_of(
        {"event": "joined", "peer": "a", "index": 0, "instance": "x", "time": 90.0},
        uploaded("a", 1, loss=2.5, steps=100),
        uploaded("b", 1, steps=60),
        committed(1),
        uploaded("a", 2, loss=2.0),
        committed(2, contributors=["a"]),
    )
    first, second = history.rounds
    assert first["losses"] == {"a": 2.5} and first["steps"] == {"a": 100, "b": 60} and first["period"] is None
    # What was said for one round is not said again for the next.
    assert second["losses"] == {"a": 2.0} and second["steps"] == {} and second["period"] == 10.0
    assert history.indices == {"a": 0} and history.last_seen["a"] == 119.0


def test_what_did_not_count_is_there_with_its_reason():
    history = history_of(
        uploaded("a", 1, loss=None),
        {"event": "closed", "round": 1, "peers": ["a"], "missing": ["c"], "time": 109.0},
        committed(1, contributors=["a"], rejected={"b": "non-finite"}, excluded={"a": ["layer.0", "layer.1"]}),
        {"event": "forgotten", "round": 2, "peer": "b", "reason": "wrong checksum", "time": 111.0},
        {"event": "evicted", "peer": "b", "reason": "too hot", "time": 112.0},
        {"event": "left", "peer": "a", "time": 113.0},
    )
    assert [(entry["kind"], entry["peer"], entry["reason"]) for entry in history.incidents] == [
        ("late", "c", "the round closed without it"),
        ("rejected", "b", "non-finite"),
        ("left out", "a", "by the guards, of layer.0, layer.1"),
        ("diverged", "a", "its training loss is non-finite"),
        ("damaged", "b", "wrong checksum"),
        ("evicted", "b", "too hot"),
        ("left", "a", "it has ended its membership"),
    ]
    assert history.counts == {"committed": 1, "rejected": 1, "evicted": 1}
    assert history.last_seen == {}


def test_new_levels_and_peers_that_are_left_out_for_long_are_incidents_and_in_the_rounds():
    levels = {"a": {"layer.0": [1.0, 2.5], "layer.1": [2.0, 4.0]}}
    history = history_of(committed(1, new_levels=levels, lasting={"b": "it has been left out for 10 rounds running"}))
    assert [(entry["kind"], entry["peer"], entry["reason"]) for entry in history.incidents] == [
        ("new level", "a", "of its norms, which most peers share, in layer.0 (1 -> 2.5), layer.1 (2 -> 4)"),
        ("left out for long", "b", "it has been left out for 10 rounds running"),
    ]
    assert history.rounds[0]["new_levels"] == levels and list(history.rounds[0]["lasting"]) == ["b"]


def test_a_long_run_is_remembered_in_bounded_memory():
    history = history_of(*(committed(number) for number in range(KEPT_ROUNDS + 5)))
    assert [entry["round"] for entry in history.rounds] == list(range(5, KEPT_ROUNDS + 5))
    assert history.counts["committed"] == KEPT_ROUNDS + 5


def overview(**more: Any) -> dict[str, Any]:
    """Return a run that is well at time 215."""
    rounds = list(history_of(*(committed(number) for number in range(12))).rounds)
    peer = {"peer": "a", "index": 0, "missed": 0}
    found = {"problem": "", "newest_round": 11, "waiting_for": "round 12 awaits a", "rounds": rounds, "rejected": {}}
    peers = [peer, {**peer, "peer": "b", "index": 1}]
    return {**found, "asynchronous": False, "quorum": 1, "places": 2, "peers": peers, **more}


@pytest.mark.parametrize(
    ("change", "seconds", "level", "reason"),
    [
        ({}, 5, "good", None),
        ({}, 39, "good", None),
        ({}, 41, "attention", "no round for 41 s, where 10.0 s are usual: round 12 awaits a"),
        ({}, 161, "problem", "no round for 161 s"),
        ({"problem": "round 12 cannot be written: the disk is full"}, 5, "problem", "round 12 cannot be written"),
        ({"rejected": {"b": "non-finite"}}, 5, "attention", "round 11 did not count b: non-finite"),
        ({"peers": []}, 5, "idle", "no peer is here: all have left, or were evicted"),
        ({"peers": [{"peer": "a", "index": 0, "missed": 0}]}, 5, "attention", "1 of 2 peers are here"),
        ({"peers": [{"peer": "a", "index": 0, "missed": 0}], "quorum": 2}, 5, "problem", "and a round needs 2"),
        ({"newest_round": None, "waiting_for": "nobody has registered yet"}, 5, "idle", "nobody has registered yet"),
    ],
)
def test_the_health_of_a_run_is_one_word_with_its_reasons(change: dict, seconds: int, level: str, reason: str | None):
    found = health_of(overview(**change), 210.0 + seconds)
    assert found["level"] == level
    assert (reason is None) == (found["reasons"] == [])
    assert reason is None or reason in found["reasons"][0]


def test_the_worst_comes_first():
    missed = [{"peer": "a", "index": 0, "missed": 3}, {"peer": "b", "index": 1, "missed": 0}]
    found = health_of(overview(peers=missed, problem="no disk"), 215.0)
    assert found["level"] == "problem"
    assert found["reasons"] == ["no disk", "the last 3 rounds went without a"]


def test_where_nobody_is_awaited_contributions_are_told_that_did_not_count():
    late = [{"peer": "a", "index": 0, "missed": 3}, {"peer": "b", "index": 1, "missed": 1}]
    assert health_of(overview(peers=late, asynchronous=True), 215.0)["reasons"] == [
        "the last 3 contributions of a did not count",
        "the last contribution of b did not count",
    ]
