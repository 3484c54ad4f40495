# SPDX-License-Identifier: Apache-2.0
"""Messages that arrive again, whenever they do and whoever sends them, change no bit of a round."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.protocol import grpc, pb2
from tests.sync_service.service import Service
from tests.sync_service.shard_caller import ShardCaller, calling
from tests.sync_service.toy_peer import start_values, trained
from tests.sync_service.whole_runs import DILOCO

MakeService = Callable[..., Service]
Code = grpc.StatusCode
START = start_values(1)
ROUNDS = 2
Sent = tuple[str, tuple[bytes, ...]]


def contribution(client: Any, number: int, values: dict[str, Any]) -> list[Sent]:
    """Return the calls by which a peer contributes to a round."""
    caller = client._membership.caller
    client._outgoing.begin(number, client.index)
    calls: list[Sent] = []
    for parts in client._outgoing.jobs(number, client.index, 16384):
        batches = client._outgoing.batches(number, parts, values)
        messages = [wire.pack(wire.Upload(caller=caller, round=number, frames=frames)) for frames in batches]
        calls.append(("Upload", tuple(messages)))
    commit = pb2.CommitRequest(caller=caller, round=number, loss=1.0, steps=1)
    return [*calls, ("Commit", (commit.SerializeToString(),))]


def send(caller: ShardCaller, calls: list[Sent]) -> set[Any]:
    """Make calls; return how they ended."""
    return {caller.send(method, *messages)[0] for method, messages in calls}


@pytest.mark.parametrize("rounds", ["synchronous", "asynchronous"])
def test_contributions_that_are_sent_again_change_no_bit_and_count_once(make_service: MakeService, rounds: str):
    run = {"peers": 2, "rounds": rounds, **DILOCO}
    service = make_service({"demo": run, "calm": run})
    service.start()
    for name in ("calm", "demo"):
        sent: list[Sent] = []
        clients = [service.client(f"p{index}", START, run=name, index=index) for index in range(2)]
        with clients[0], clients[1], calling(service.address) as caller:
            held = [client.start(START) for client in clients]
            for _ in range(ROUNDS):
                numbers = [client.round + 1 for client in clients]
                for index, client in enumerate(clients):
                    if index and rounds == "asynchronous":
                        held[0] = clients[0].fetch(numbers[0], held[0]).values
                    mine = contribution(client, numbers[index], trained(held[index], index, numbers[index]))
                    assert send(caller, mine) == {Code.OK}
                    sent += mine
                    if name == "demo":
                        # All of every round so far, while the round is open, and then while it is made. An asynchronous
                        # contribution that is not used yet lets older ones be tried again.
                        for _ in range(2):
                            assert send(caller, sent) <= {Code.OK, Code.UNAVAILABLE}
                for index, client in enumerate(clients):
                    if index or rounds == "synchronous":
                        held[index] = client.fetch(numbers[index], held[index]).values
                if name == "demo":
                    before = service.journal(name)
                    assert send(caller, sent) == {Code.OK}
                    assert service.journal(name) == before
    count = ROUNDS if rounds == "synchronous" else 2 * ROUNDS
    assert [event["round"] for event in service.events("committed", "demo")] == list(range(count + 1))
    assert [event["digest"] for event in service.events("committed", "demo")] == [
        event["digest"] for event in service.events("committed", "calm")
    ]
    assert len(service.events("uploaded", "demo")) == len(service.events("uploaded", "calm"))
    assert not list((service.state / "runs" / "demo" / "spool").rglob("*.frames"))


def test_what_a_former_process_of_a_peer_sent_is_refused_whenever_it_arrives(make_service: MakeService):
    service = make_service({"demo": {"peers": 1, **DILOCO}})
    service.start()
    clients = [service.client("p0", START) for _ in range(2)]
    with clients[0] as former, clients[1] as process, calling(service.address) as caller:
        start = former.start(START)
        late = contribution(former, 1, trained(start, 0, 5))
        who = former._membership.caller
        late += [
            ("Heartbeat", (pb2.HeartbeatRequest(caller=who, alive_seconds=60.0).SerializeToString(),)),
            ("Resume", (pb2.ResumeRequest(caller=who).SerializeToString(),)),
            ("Await", (pb2.AwaitRequest(caller=who, round=1).SerializeToString(),)),
            ("Leave", (pb2.LeaveRequest(caller=who).SerializeToString(),)),
        ]
        assert send(caller, late[:1]) == {Code.OK}  # in time, but not committed
        process.start(START)
        values = trained(start, 0, 1)
        for messages in contribution(process, 1, values):
            assert send(caller, late) == {Code.FAILED_PRECONDITION}
            assert send(caller, [messages]) == {Code.OK}
        found = process.fetch(1, values)
        assert found.contributed and send(caller, late) == {Code.FAILED_PRECONDITION}
    (event,) = service.events("uploaded")[1:]
    assert event["round"] == 1
    # The round is that of the process alone: nothing of what the former one had sent is in it.
    for name, value in found.values.items():
        expected = START[name] + (values[name] - START[name]) * 0.7 * 1.9
        assert value.sub(expected).abs().max() < 1e-5
