# SPDX-License-Identifier: Apache-2.0
"""Peers that come too late for a round, and clocks that jump."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from megatron_ext.sync_service.protocol.report import Report
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import digest, start_values, trained
from tests.sync_service.whole_runs import DILOCO, ROUNDS, check_history

MakeService = Callable[..., Service]


def test_a_slow_peer_past_the_grace_window_loses_its_interval_and_takes_part_again(make_service: MakeService):
    service = make_service({"demo": {"peers": 2, "quorum": 1, "grace_seconds": 2.0}})
    service.start()
    start = start_values(1)
    with service.client("p0", start) as fast, service.client("p1", start) as slow:
        values = {client: client.start(start) for client in (fast, slow)}
        fast.upload(1, values[fast])
        outcome = fast.fetch(1, values[fast])
        assert outcome.contributors == ("p0",)
        late = slow.sync(trained(values[slow], 1, 1))
        assert (late.number, late.contributed) == (1, False) and digest(late.values) == digest(outcome.values)
        for client in (fast, slow):
            client.upload(2, outcome.values)
        for client in (fast, slow):
            assert client.fetch(2, outcome.values).contributors == ("p0", "p1")
    assert service.events("closed")[1]["missing"] == ["p1"]
    check_history(service, 2)


def test_a_late_peer_takes_the_round_that_is_made_without_it_and_loses_one_interval(make_service: MakeService):
    service = make_service({"demo": {"peers": 3, "quorum": 2, "grace_seconds": 1.0}})
    server = service.start()
    start = start_values(1)
    with service.client("p0", start) as a, service.client("p1", start) as b, service.client("p2", start) as late:
        values, *_ = (client.start(start) for client in (a, b, late))
        for client in (a, b):
            client.upload(1, values)
        for client in (a, b):
            client.fetch(1, values)
        a.upload(2, values)
        b._upload(2, values)
        server.limit_files(40_000)  # the round is closed, and its values have no room
        b._membership.commit(2, Report())
        until(lambda: "round 2 cannot be written" in service.output, "the server's complaint")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(late.sync, trained(values, 2, 1))
            time.sleep(1)
            server.limit_files(-1)
            # From the values of round 1 its next interval would be too late as well.
            assert (asked.result().number, asked.result().contributed) == (2, False)
        for client in (a, b, late):
            client.upload(3, values)
        assert a.fetch(3, values).contributors == ("p0", "p1", "p2")
    check_history(service, 3)


def test_a_clock_that_jumps_changes_nothing(make_service: MakeService, undisturbed: list[str]):
    """Rounds and deadlines follow a clock that never goes back; the journal's times are for people."""
    service = make_service(**DILOCO)
    service.start(clock_jumps=True)
    indices = [{"index": index} for index in range(2)]
    peers = [service.peer(f"p{at['index']}", ROUNDS, options=at, seed=7, clock_jumps=True) for at in indices]
    assert [peer.wait() for peer in peers] == [0, 0]
    check_history(service, ROUNDS)
    assert [event["digest"] for event in service.events("committed")] == undisturbed
    times = [event["time"] for event in service.journal()]
    assert times != sorted(times)
