# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds: the state machine by itself, then a real server and peers."""

import json
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.outer.optimizers.delayed_nesterov import DelayedNesterov
from megatron_ext.sync_service.peer.client import Report, SyncClient
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.members import Policy
from tests.support.every_run import one_of_each
from tests.support.waiting import until
from tests.sync_service.cluster import Cluster
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import SHAPES, digest, start_values, trained

MakeService = Callable[..., Service]
ASYNC = {"rounds": "asynchronous"}
DELAYED = {**ASYNC, "outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "contributions_per_step": 2}

# -------------------------------------------------------------------------------------------------------------------
# The state machine
# -------------------------------------------------------------------------------------------------------------------

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
    machine = Machine(max_staleness=limit, weighs_steps=True).started("a", "b", "c")
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
                event = machine.make()
                used.append((event["peers"][0], event["made_for"] - 1))
                assert event["weight"] > 0
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


def test_peers_count_by_their_steps_in_relation_to_all():
    machine = Machine(weighs_steps=True).started("a", "b")
    weights = []
    for name, steps in (("a", 30), ("b", 10), ("a", 30), ("b", 50)):
        machine.upload(name, steps)
        weights.append(machine.make()["weight"])
        machine.base[name] = machine.state.open_round - 1
    # The publisher's start was the first that a has said.
    assert weights == [1.0, 0.5, 1.5, 50 * 2 / 80]
    machine.record({"event": "left", "peer": "b"})
    machine.upload("a", 20)
    assert machine.make()["weight"] == 1.0


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


# -------------------------------------------------------------------------------------------------------------------
# A real server
# -------------------------------------------------------------------------------------------------------------------


def script(clients: list[SyncClient], turns: str) -> list[str]:
    """Let peers start and contribute in an order, each for a number of steps of its own; return the digests seen."""
    values = [client.start(start_values(7)) for client in clients]
    seen = [digest(values[0])]
    for turn in turns:
        index = int(turn)
        client = clients[index]
        values[index] = trained(values[index], index, client.round + 1)
        outcome = client.sync(values[index], Report(loss=1.0, steps=10 * (1 + index)))
        assert outcome.contributed and outcome.contributors == (client.config.peer,)
        values[index] = outcome.values
        seen.append(digest(outcome.values))
    return seen


def expected(turns: str, *, per_step: int, lr: float, momentum: float, weighted: bool) -> list[str]:
    """Return the digests that the formula gives in one process."""
    start = start_values(7)
    flat = {name: value.clone().view(-1) for name, value in start.items()}
    optimizers = {name: DelayedNesterov([flat[name]], lr=lr, momentum=momentum, count=per_step) for name in start}
    bases, rounds = {0: 0, 1: 0, 2: 0}, [start]
    known: dict[int, int] = {}
    for turn in turns:
        index = int(turn)
        base = rounds[bases[index]]
        known[index] = 10 * (1 + index)
        weight = known[index] * len(known) / sum(known.values()) if weighted else 1.0
        after = trained(base, index, bases[index] + 1)
        for name in SHAPES:
            gradient = (base[name] - after[name]).view(-1)
            optimizers[name].step(0, slice(None), gradient.mul_(weight) if weight != 1 else gradient)
        rounds.append({name: value.clone().view(SHAPES[name]) for name, value in flat.items()})
        bases[index] = len(rounds) - 1
    return [digest(values) for values in rounds]


def begin(service: Service, shards: int, failpoints: Mapping[int, str] | None = None) -> Cluster:
    """Start one server, or several that have parts of the values."""
    cluster = Cluster(service, shards, **service.extra)
    cluster.start_all(failpoints)
    return cluster


TURNS = "0120012"
CATALOG = Catalog.of_tensors(start_values(0))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["average", "delayed-nesterov"])
def test_the_values_are_where_the_formula_says_for_the_order_of_arrival(
    make_service: MakeService, momentum: float, shards: int
):
    outer = {**DELAYED, "step_weights": True} if momentum else {**ASYNC, "reducer": "linear"}
    service = make_service(peers=3, **outer)
    begin(service, shards)
    with ExitStack() as stack:
        clients = [stack.enter_context(service.client(f"p{index}", CATALOG, index=index)) for index in range(3)]
        seen = script(clients, TURNS)
    lr, per_step = (0.7, 2) if momentum else (1.0, 3)
    assert seen == expected(TURNS, per_step=per_step, lr=lr, momentum=momentum, weighted=bool(momentum))
    assert [event["digest"] for event in service.events("committed")] == seen
    assert [event["made_for"] for event in service.events("committed")[1:]] == [1, 1, 1, 2, 5, 3, 4]


@pytest.mark.parametrize(
    ("failpoint", "shards", "victim"),
    one_of_each(
        [
            ("upload_journaled:4", 1, 0),
            ("round_closed:5", 1, 0),
            ("tensor_reduced:12", 1, 0),
            ("snapshot_renamed:4", 1, 0),
            ("round_committed:4", 3, 0),
            ("snapshot_renamed:4", 3, 0),
            ("frame_spooled:4", 3, 1),
            ("upload_checked:4", 3, 1),
            ("snapshot_written:4", 3, 2),
        ],
        {1, 3, 4, 7},
    ),
)
def test_a_server_killed_at_any_step_resumes_bit_for_bit(
    make_service: MakeService, failpoint: str, shards: int, victim: int
):
    service = make_service(peers=3, **DELAYED)
    cluster = begin(service, shards, {victim: failpoint})
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        clients = [stack.enter_context(service.client(f"p{index}", CATALOG, index=index)) for index in range(3)]
        seen = pool.submit(script, clients, TURNS)
        assert cluster.servers[victim].wait() == -signal.SIGKILL
        cluster.start(victim)
        assert seen.result() == expected(TURNS, per_step=2, lr=0.7, momentum=0.9, weighted=False)
    uploads = [(event["peer"], event["round"]) for event in service.events("uploaded")]
    assert len(set(uploads)) == len(uploads) == 1 + len(TURNS)


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


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_lossy_contributions_lose_nothing_for_good(make_service: MakeService, codec: str):
    service = make_service(peers=2, **ASYNC)
    service.start()
    start, target = {"w": torch.zeros(256)}, torch.linspace(0.5, 1.0, 256)
    with ExitStack() as stack:
        clients = [stack.enter_context(service.client(f"p{index}", start, codec=codec)) for index in range(2)]
        values = [client.start(start)["w"] for client in clients]
        for turn in (0, 1, 0, 0, 1, 0, 1, 1):
            values[turn] = clients[turn].sync({"w": values[turn] + target}).values["w"]
    # Each of the eight counts a half; what codecs lose of one comes with the next.
    torch.testing.assert_close(values[1], 4 * target, rtol=0, atol=0.02)


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
    owned = Catalog([TensorSpec(name="w", shape=(4,), owners=(0,))])
    with (
        service.client("p0", owned) as client,
        pytest.raises(UserError, match="tensor 'w' has owners, and the run asyn"),
    ):
        client.register()
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
