# SPDX-License-Identifier: Apache-2.0
"""Servers and peers that are killed: nothing committed is lost, no bit changes, and the survivors continue."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.values.failpoints import FAILPOINTS
from tests.support.every_run import one_of_each
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import digest, start_values, trained
from tests.sync_service.whole_runs import DILOCO, ROUNDS, check_history

MakeService = Callable[..., Service]
# At which time: in the middle of round 1, or of round 2 where there is a momentum to lose. Merging has its own test.
PASSED = [name for name in FAILPOINTS if name != "layer_merged"]
TIMES = dict(zip(PASSED, (20, 4, 4, 2, 7, 3, 3, 3, 3), strict=True))


@pytest.mark.parametrize("failpoint", one_of_each([f"{name}:{times}" for name, times in TIMES.items()], {0, 2, 4, 7}))
def test_a_server_killed_at_any_step_of_a_round_resumes_as_if_nothing_had_been(
    make_service: MakeService, undisturbed: list[str], failpoint: str
):
    service = make_service(**DILOCO)
    server = service.start(failpoint)
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert server.wait() == -signal.SIGKILL
    before = [(event["round"], event["digest"]) for event in service.events("committed")]
    service.start()
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    after = [(event["round"], event["digest"]) for event in service.events("committed")]
    assert after[: len(before)] == before
    assert after == list(enumerate(undisturbed))
    for index in range(2):
        assert [service.seen(f"p{index}")[number]["digest"] for number in range(ROUNDS + 1)] == undisturbed
    check_history(service, ROUNDS)
    assert len(service.events("started")) == 2


@pytest.mark.parametrize("place", ["before_upload", "during_upload", "after_upload"])
def test_a_peer_killed_around_its_upload_comes_back_and_changes_no_bit(
    make_service: MakeService, undisturbed: list[str], place: str
):
    service = make_service(**DILOCO)
    service.start()
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(1)]
    victim = service.peer("p1", ROUNDS, options={"index": 1}, seed=7, die=[2, place])
    assert victim.wait() == -signal.SIGKILL
    again = service.peer("p1", ROUNDS, options={"index": 1}, seed=7)
    assert [peer.wait() for peer in (*peers, again)] == [0, 0], again.output
    assert [event["digest"] for event in service.events("committed")] == undisturbed
    check_history(service, ROUNDS)


def test_what_a_killed_process_had_committed_counts_and_the_next_one_sends_nothing(make_service: MakeService):
    service = make_service(peers=2)
    service.start()
    start = start_values(1)
    with service.client("p0", start) as killed, service.client("p0", start) as again, service.client("p1", start) as p1:
        killed.start(start)
        p1.start(start)
        sent = trained(start, 0, 1)
        killed.upload(1, sent)
        assert again.start(start_values(2)).keys() == start.keys() and again.uploaded
        p1.upload(1, sent)
        other = {name: value + 1 for name, value in start.items()}
        assert digest(again.sync(other).values) == digest(p1.fetch(1, sent).values) == digest(sent)


def test_survivors_continue_without_a_peer_that_died_halfway_through_its_upload(make_service: MakeService):
    # Round 1 has all three, also where one of them is late on a busy machine.
    service = make_service({"demo": {"peers": 3, "quorum": 2, "grace_seconds": 6.0}})
    service.start()
    names = ["p0", "p1", "p2"]
    peers = [
        service.peer(name, 4, options={"index": index}, **({"die": [2, "during_upload"]} if index == 1 else {}))
        for index, name in enumerate(names)
    ]
    assert [peer.wait() for peer in peers] == [0, -signal.SIGKILL, 0]
    contributors = {event["round"]: event["contributors"] for event in service.events("committed")}
    assert contributors[1] == names and contributors[2] == contributors[4] == ["p0", "p2"]
    closed = {event["round"]: event["missing"] for event in service.events("closed")}
    # Awaited once, then no longer.
    assert closed[2] == ["p1"] and closed[3] == closed[4] == []
    assert service.seen("p0")[4]["digest"] == service.seen("p2")[4]["digest"]
    check_history(service, 4)


def test_an_outage_is_told_once_however_many_streams_meet_it(
    make_service: MakeService, caplog: pytest.LogCaptureFixture
):
    service = make_service(peers=1)
    with ThreadPoolExecutor(3) as streams:
        connection = None
        for _ in range(2):
            server = service.start()
            connection = connection or Connection(ConnectionConfig(server=service.address, patience_seconds=60))
            connection.call("Status", pb2.StatusRequest())
            server.kill()
            server.wait()
            caplog.clear()
            calls = [streams.submit(connection.call, "Status", pb2.StatusRequest()) for _ in range(3)]
            until(lambda: "trying again" in caplog.text, "the outage is noticed")
            service.start()
            assert all(call.result() is not None for call in calls)
            assert caplog.text.count("trying again") == 1
            service.stop()
        connection.close()
