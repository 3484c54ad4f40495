# SPDX-License-Identifier: Apache-2.0
"""The state machine of a run, by itself."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.members import Policy
from megatron_ext.sync_service.rounds.round import RunState


class Machine:
    """A state with the journal that leads to it."""

    def __init__(self, peers: int = 3, quorum: int | None = None, grace: float = 10.0) -> None:
        self.policy = Policy(peers=peers, quorum=peers if quorum is None else quorum, grace_seconds=grace)
        self.state = RunState(self.policy)
        self.journal: list[dict[str, Any]] = []
        self.record({"event": "created", "config": {"codec": "fp32"}, "catalog": [], "peers": peers})

    def record(self, event: dict[str, Any]) -> None:
        self.journal.append(json.loads(json.dumps(event)))
        self.state.apply(self.journal[-1])

    def join(self, *names: str) -> "Machine":
        for name in names:
            event = self.state.check_joining(name, f"of {name}", None)
            if event is not None:
                self.record(event)
        return self

    def upload(self, *names: str) -> "Machine":
        for name in names:
            assert self.state.accepts(name, self.state.open_round)
            self.record({"event": "uploaded", "round": self.state.open_round, "peer": name})
        return self

    def close(self) -> tuple[str, ...]:
        self.record(self.state.closing_event())
        assert self.state.closing is not None
        return self.state.closing

    def close_and_commit_start(self) -> "Machine":
        self.close()
        return self.commit()

    def commit(self, **rejected: str) -> "Machine":
        assert self.state.closing is not None
        contributors = [name for name in self.state.closing if name not in rejected]
        self.record(
            {
                "event": "committed",
                "round": self.state.open_round,
                "digest": f"d{self.state.open_round}",
                "contributors": contributors,
                "rejected": rejected,
                "outer_scalars": {},
            }
        )
        return self

    def started(self, *names: str) -> "Machine":
        self.join(*names).upload(names[0])
        self.close()
        return self.commit()


def facts(state: RunState) -> str:
    """Everything but the clock."""
    return repr({key: value for key, value in vars(state).items() if key != "_quorum_since"})


def test_the_first_peer_publishes_the_start_and_nobody_else():
    machine = Machine().join("a", "b")
    assert machine.state.publisher == "a" and machine.state.seconds_until_close(0) is None
    with pytest.raises(Refusal, match="published by peer 'a'"):
        machine.state.accepts("b", 0)
    machine.upload("a")
    assert machine.state.seconds_until_close(0) == 0
    assert machine.close() == ("a",)
    machine.commit()
    assert machine.state.open_round == 1 and machine.state.awaited() == ["a", "b"]


def test_another_peer_publishes_when_the_first_one_goes():
    machine = Machine().join("a", "b", "c")
    machine.record({"event": "evicted", "peer": "a", "reason": "test"})
    assert machine.state.publisher == "b"
    machine.record({"event": "left", "peer": "b"})
    assert machine.state.publisher == "c"


def test_a_round_closes_at_once_when_all_that_are_awaited_are_in():
    machine = Machine().started("a", "b", "c").upload("c", "b")
    assert machine.state.seconds_until_close(5) is None
    machine.upload("a")
    assert machine.state.seconds_until_close(5) == 0
    assert machine.close() == ("a", "b", "c")


def test_a_round_closes_a_grace_window_after_its_quorum():
    machine = Machine(quorum=2, grace=10).started("a", "b", "c").upload("b")
    assert machine.state.seconds_until_close(100) is None
    machine.upload("a")
    assert machine.state.seconds_until_close(103) == 10
    assert machine.state.seconds_until_close(111) == 2
    assert machine.state.seconds_until_close(113) == 0
    assert machine.close() == ("a", "b")
    assert machine.journal[-1]["missing"] == ["c"]


def test_a_grace_window_ends_when_all_that_are_awaited_are_gone():
    machine = Machine(peers=4, quorum=2, grace=10).started("a", "b", "c", "d").upload("a", "b")
    alive_until = {"a": 0.0, "b": 0.0, "c": 103.0, "d": 106.0}
    assert machine.state.seconds_until_close(100, alive_until.__getitem__) == 6
    alive_until["d"] = 200.0  # it is alive, and slow
    assert machine.state.seconds_until_close(104, alive_until.__getitem__) == 6
    alive_until.update(c=5.0, d=5.0)
    assert machine.state.seconds_until_close(104, alive_until.__getitem__) == 0
    assert machine.close() == ("a", "b")
    assert machine.journal[-1]["missing"] == ["c", "d"]


def test_below_its_quorum_a_round_waits_for_peers_that_are_gone():
    machine = Machine(peers=3).started("a", "b", "c").upload("a", "b")
    assert machine.state.seconds_until_close(100, lambda peer: 0.0) is None


def test_every_round_has_a_grace_window_of_its_own():
    machine = Machine(quorum=2, grace=10).started("a", "b", "c").upload("a", "b")
    assert machine.state.seconds_until_close(100) == 10
    machine.upload("c").close()
    machine.commit().upload("a", "b")
    assert machine.state.seconds_until_close(200) == 10


def test_no_round_closes_below_its_quorum_however_long_it_takes():
    machine = Machine(peers=3).started("a", "b").upload("a", "b")
    assert machine.state.seconds_until_close(10**9) is None
    assert "1 more of its quorum of 3" in machine.state.waiting_for()


def test_a_peer_that_missed_a_round_is_awaited_again_when_it_takes_its_values():
    machine = Machine(quorum=2).started("a", "b", "c").upload("a", "b")
    machine.close()
    assert not machine.state.accepts("c", 1)
    machine.commit().upload("a", "b")
    assert machine.state.awaited() == [] and machine.state.seconds_until_close(0) == 0
    machine.state.adopted("c", 0)
    assert machine.state.awaited() == []
    machine.state.adopted("c", 1)
    assert machine.state.awaited() == ["c"]


def test_a_peer_that_is_late_for_two_rounds_waits_for_the_one_that_is_made_without_it():
    machine = Machine(quorum=2).started("a", "b", "c").upload("a", "b")
    machine.close()
    machine.commit().upload("a", "b")
    assert machine.state.answer("c", 1, True)[0] == "committed"
    machine.close()
    # What it would make of round 1 would come too late for round 2.
    assert machine.state.answer("c", 1, True) == ("waiting", "round 2 is being reduced")
    assert machine.state.answer("a", 1, True)[0] == "committed"
    assert machine.state.ledger("demo", "c", {0, 1}).is_made_without
    assert not machine.state.ledger("demo", "a", {0, 1}).is_made_without
    machine.commit()
    assert machine.state.answer("c", 1, True)[0] == "committed"
    assert not machine.state.ledger("demo", "c", {0, 1, 2}).is_made_without


def test_places_are_given_from_below_and_never_twice():
    machine = Machine().join("a", "b")
    assert machine.state.check_joining("c", "x", 2) == {"event": "joined", "peer": "c", "index": 2, "instance": "x"}
    for index, problem in ((0, "peer 'a' has it"), (3, "places 0 to 2")):
        with pytest.raises(Refusal, match=problem):
            machine.state.check_joining("c", "x", index)
    machine.join("c")
    with pytest.raises(Refusal, match=r"all 3 places .* taken \(a, b, c\)"):
        machine.state.check_joining("d", "x", None)
    machine.record({"event": "left", "peer": "b"})
    event = machine.state.check_joining("d", "x", None)
    assert event is not None and event["index"] == 1


def test_a_new_process_of_a_peer_replaces_the_old_one():
    machine = Machine().join("a", "b")
    event = machine.state.check_joining("a", "second", None)
    assert event is not None and event["index"] == 0
    machine.record(event)
    machine.state.check_caller("a", "second")
    with pytest.raises(Refusal, match="another process has registered as peer 'a'"):
        machine.state.check_caller("a", "of a")


def test_an_evicted_process_stays_out_and_a_new_one_may_come():
    machine = Machine().started("a", "b", "c").upload("b")
    machine.record({"event": "evicted", "peer": "b", "reason": "too hot"})
    assert machine.state.uploaded == {}
    for check in (
        lambda: machine.state.check_caller("b", "of b"),
        lambda: machine.state.check_joining("b", "of b", None),
    ):
        with pytest.raises(Refusal, match="evicted: too hot") as caught:
            check()
        assert caught.value.reason == "denied"
    assert machine.state.check_joining("b", "new", None) is not None


def test_what_a_peer_committed_counts_though_it_has_left():
    machine = Machine(quorum=2).started("a", "b", "c").upload("a", "b")
    machine.record({"event": "left", "peer": "b"})
    machine.upload("c")
    assert machine.close() == ("a", "b", "c")


def test_a_contribution_counts_in_its_own_round_only():
    machine = Machine().started("a", "b", "c")
    assert not machine.state.accepts("a", 0)
    with pytest.raises(Refusal, match="round 2 is not open yet"):
        machine.state.accepts("a", 2)
    machine.upload("a", "b", "c").close()
    assert not machine.state.accepts("a", 1)


STEPS = st.sampled_from(
    [*(f"{verb} {name}" for verb in ("join", "upload", "leave", "evict", "adopt", "forget") for name in "abcd"), "tick"]
)


@given(st.lists(STEPS, max_size=60), st.integers(1, 3))
def test_whatever_happens_the_promises_hold_and_a_replay_gives_the_same_state(steps: list[str], quorum: int):
    machine = Machine(quorum=quorum, grace=2)
    now, committed, used = 0.0, [], []
    for step in steps:
        verb, _, name = step.partition(" ")
        state, now = machine.state, now + 1
        try:
            if verb == "join":
                machine.join(name)
            elif name and name not in state.members:
                continue
            elif verb == "upload" and name not in state.uploaded and state.accepts(name, state.open_round):
                machine.upload(name)
            elif verb in ("leave", "evict"):
                machine.record({"event": {"leave": "left", "evict": "evicted"}[verb], "peer": name, "reason": ""})
            elif verb == "adopt":
                state.adopted(name, state.open_round - 1)
            elif verb == "forget" and name in state.uploaded:
                machine.record({"event": "forgotten", "round": state.open_round, "peer": name, "reason": ""})
        except Refusal:
            continue
        if state.seconds_until_close(now) == 0:
            closing = machine.close()
            assert closing and (state.open_round == 0 or len(closing) >= quorum)
            used += [(state.open_round, peer) for peer in closing]
            machine.commit()
            committed.append(state.open_round - 1)
    assert committed == list(range(len(committed)))
    assert len(used) == len(set(used))
    indices = [member.index for member in machine.state.members.values()]
    assert len(set(indices)) == len(indices) and all(index < 3 for index in indices)
    again = RunState(machine.policy)
    for event in machine.journal:
        again.apply(event)
    again.await_everybody()
    machine.state.await_everybody()
    assert facts(again) == facts(machine.state)


@pytest.mark.parametrize(("peers", "named"), [(5, "p0, p1, p2, p3, p4"), (9, "p0, p1, p2, p3, p4 and 4 others")])
def test_a_full_run_names_five_of_its_peers_at_most(peers: int, named: str):
    machine = Machine(peers=peers).join(*(f"p{index}" for index in range(peers)))
    with pytest.raises(Refusal) as refused:
        machine.join("late")
    assert f"all {peers} places of the run are taken ({named}); one has to leave" in str(refused.value)


def test_who_has_left_keeps_its_place_while_its_contribution_waits_for_a_round():
    machine = Machine(peers=2).join("a", "b").upload("a").close_and_commit_start()
    machine.upload("b")
    machine.record({"event": "left", "peer": "b"})
    with pytest.raises(Refusal, match="what b contributed before leaving still counts in round 1") as refused:
        machine.join("c")
    assert refused.value.reason == "later"
    with pytest.raises(Refusal, match="index 1 is asked for, but what peer 'b' has contributed"):
        machine.state.check_joining("c", "of c", 1)
    # Its own place it gets back.
    assert machine.join("b").state.members["b"].index == 1
    machine.record({"event": "left", "peer": "b"})
    machine.upload("a").close()
    assert machine.commit().join("c").state.members["c"].index == 1


def test_nobody_gets_the_place_with_which_a_peer_contributed_that_has_another_one_now():
    machine = Machine(peers=3).join("a", "b").upload("a").close_and_commit_start()
    machine.upload("b")
    machine.record({"event": "left", "peer": "b"})
    machine.record(machine.state.check_joining("b", "of b", 2))
    with pytest.raises(Refusal, match="what b contributed before leaving still counts in round 1"):
        machine.join("c")


def test_an_evicted_peers_contribution_is_gone_when_the_round_has_to_be_closed_again():
    machine = Machine(peers=3).join("a", "b", "c").upload("a").close_and_commit_start()
    machine.upload("a", "b", "c").close()
    machine.record({"event": "evicted", "peer": "b", "reason": "broken"})
    assert machine.state.closing == ("a", "b", "c")  # what is being made is not disturbed
    machine.record({"event": "forgotten", "round": 1, "peer": "c", "reason": "damaged"})
    assert list(machine.state.uploaded) == ["a"]


def test_how_far_an_evicted_peer_was_is_not_known_by_what_it_sent_in_vain():
    machine = Machine(peers=2).join("a", "b").upload("a").close_and_commit_start()
    event = {"event": "uploaded", "round": 1, "peer": "b"}
    machine.record({**event, "progress": [7, 28, 0.0, 4]})
    machine.record({"event": "evicted", "peer": "b", "reason": "broken"})
    machine.record(machine.state.check_joining("b", "another process", None))
    machine.record(event)
    machine.upload("a").close()
    machine.commit()
    assert machine.state.counted == {}
