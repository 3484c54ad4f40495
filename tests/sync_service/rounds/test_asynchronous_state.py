# SPDX-License-Identifier: Apache-2.0
"""The state machine of asynchronous rounds by itself: whose contribution comes next, and how much it counts."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.members import Policy

# Mostly what happens mostly, else nothing is ever in the queue.
VERBS = (*["upload"] * 6, *["join", "adopt"] * 2, "leave", "evict", "forget")
STEPS = st.sampled_from([*(f"{verb} {name}" for verb in VERBS for name in "abc"), *["make"] * 8])


class Machine:
    """A state with the journal that leads to it, and what its peers have continued from."""

    def __init__(self, **policy: Any) -> None:
        fields = {"peers": 3, "quorum": 1, "grace_seconds": 0.0, "is_asynchronous": True, **policy}
        self.policy = Policy(**fields)
        self.state = AsynchronousState(self.policy)
        self.journal: list[dict[str, Any]] = []
        self.base: dict[str, int] = {}
        self.record({"event": "created", "config": {"codec": "fp32"}, "catalog": [], "peers": 3})

    def record(self, event: dict[str, Any]) -> None:
        self.journal.append(json.loads(json.dumps(event)))
        self.state.apply(self.journal[-1])

    def join(self, name: str) -> None:
        event = self.state.check_joining(name, f"of {name}", None)
        if event is not None:
            self.record(event)
        self.base[name] = self.state.open_round - 1

    def upload(self, name: str, steps: int = 10) -> bool:
        number = self.base[name] + 1
        if name in self.state.uploaded or not self.state.accepts(name, number):
            event = self.state.stale_event(name, number)
            if event is not None:
                self.record(event)
            return False
        self.record({"event": "uploaded", "round": number, "peer": name, "steps": steps})
        return True

    def make(self, *, commit: bool = True) -> dict[str, Any]:
        event = self.state.closing_event()
        self.record(event)
        if commit:
            self.commit()
        return event

    def commit(self) -> None:
        assert self.state.closing is not None
        made = {"contributors": list(self.state.closing), "rejected": {}, "digest": "", "outer_scalars": {}}
        self.record({"event": "committed", "round": self.state.open_round, **made})

    def started(self, *names: str) -> "Machine":
        for name in names:
            self.join(name)
        self.base = dict.fromkeys(names, -1)
        self.upload(names[0])
        self.make()
        self.base = dict.fromkeys(names, 0)
        return self


@given(st.lists(STEPS, max_size=60), st.sampled_from([None, 0, 2]))
def test_whatever_happens_contributions_count_once_in_their_order_and_a_replay_agrees(
    steps: list[str], limit: int | None
):
    machine = Machine(max_staleness=limit).started("a", "b", "c")
    came, used = [], []
    for step in steps:
        verb, _, name = step.partition(" ")
        state = machine.state
        try:
            if verb == "join":
                machine.join(name)
            elif name and name not in state.members:
                continue
            elif verb == "upload" and machine.upload(name):
                came.append((name, machine.base[name]))
            elif verb in ("leave", "evict"):
                machine.record({"event": {"leave": "left", "evict": "evicted"}[verb], "peer": name, "reason": ""})
            elif verb == "adopt":
                machine.base[name] = state.open_round - 1
            elif verb == "forget" and name in state.uploaded:
                # Made again, it has a later turn.
                came.remove((name, state.made_for(name) - 1))
                machine.record({"event": "forgotten", "round": state.made_for(name), "peer": name, "reason": ""})
            elif verb == "make" and state.seconds_until_close(0.0) == 0:
                event = machine.make(commit=False)
                assert {peer for peer, _ in state.beside.values()} == state.members.keys() - set(event["peers"])
                machine.commit()
                used.append((event["peers"][0], event["made_for"] - 1))
                assert limit is None or event["made_for"] <= event["round"]
        except Refusal:
            continue
    assert len(used) == len(set(used))
    order = [came.index(entry) for entry in used]
    assert order == sorted(order)
    again = AsynchronousState(machine.policy)
    for event in machine.journal:
        again.apply(event)
    for state in (again, machine.state):
        state.await_everybody()
    assert vars(again) == vars(machine.state)


def test_the_other_members_stand_beside_a_contribution_also_when_they_leave_while_it_is_used():
    machine = Machine().started("a", "b", "c")
    machine.upload("b")
    machine.make(commit=False)
    machine.record({"event": "left", "peer": "c"})
    assert machine.state.beside == {0: ("a", 10), 2: ("c", None)}
    again = AsynchronousState(machine.policy)
    again.apply({"event": "recovered", "state": json.loads(json.dumps(machine.state.as_json()))})
    assert again.beside == machine.state.beside
    machine.commit()
    assert machine.state.beside == {}
    machine.upload("a")
    machine.make(commit=False)
    assert machine.state.beside == {1: ("b", 10)}


def test_a_contribution_that_is_too_old_is_said_so_once():
    machine = Machine(max_staleness=1).started("a", "b")
    for _ in range(2):
        machine.upload("a")
        machine.make()
        machine.base["a"] = machine.state.open_round - 1
    assert not machine.upload("b") and not machine.upload("b")
    (event,) = [event for event in machine.journal if event["event"] == "stale"]
    assert event["reason"] == "2 rounds were made since the values that it started from; max_staleness is 1"
    assert machine.state.outcome("b", 1).rejected == {"b": event["reason"]}
    assert machine.state.answer("b", 1, False) == ("committed", "")
    assert machine.state.members["b"].missed == 1
    machine.base["b"] = 2
    assert machine.upload("b")
    machine.make()
    assert machine.state.members["b"].missed == 0


def test_a_call_that_comes_late_does_not_make_a_newer_contribution_forgotten():
    machine = Machine(max_staleness=1).started("a", "b")
    for name in ("b", "b", "b", "a"):
        machine.base[name] = machine.state.open_round - 1
        assert machine.upload(name)
        machine.make()
    newest = machine.state.contributed("a")
    machine.base["a"] = 0
    assert not machine.upload("a")
    assert machine.state.contributed("a") == newest and not machine.state.accepts("a", newest)
    # Who rolled back to that gets the newest values.
    assert machine.state.answer("a", 1, True) == ("committed", "")
    assert machine.state.answer("a", newest, True) == ("committed", "")


def test_a_peer_waits_for_its_own_contribution_and_for_nobody_else():
    machine = Machine().started("a", "b")
    machine.upload("b")
    machine.upload("a")
    assert machine.state.answer("a", 1, True)[0] == "waiting"
    assert machine.make()["peers"] == ["b"]
    assert machine.state.answer("b", 1, True) == ("committed", "")
    assert machine.state.answer("a", 1, True)[0] == "waiting"
    with pytest.raises(Refusal, match="is not used yet") as caught:
        machine.state.accepts("a", 2)
    assert caught.value.reason == "later"
    machine.make()
    assert machine.state.outcome("a", 1).number == 2 and machine.state.seconds_until_close(0.0) is None


def test_what_an_evicted_peer_has_made_does_not_count_while_another_ones_is_used():
    machine = Machine().started("a", "b")
    machine.upload("a")
    machine.upload("b")
    machine.make(commit=False)
    machine.record({"event": "evicted", "peer": "b", "reason": ""})
    machine.commit()
    assert machine.state.uploaded == {} and machine.state.open_round == 2
