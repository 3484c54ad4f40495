# SPDX-License-Identifier: Apache-2.0
"""A server that is drained waits for whoever may still come, and for nobody who is gone."""

import time
from collections.abc import Callable

import pytest

from megatron_ext.cli.main import main
from megatron_ext.sync_service.protocol.durations import LONGEST_ALIVE_SECONDS
from megatron_ext.sync_service.rounds.draining import LINGER_SECONDS, Draining
from megatron_ext.sync_service.rounds.presence import Presence
from tests.support.waiting import PATIENCE
from tests.sync_service.cluster import Cluster
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import start_values

MakeService = Callable[..., Service]
START = start_values(1)


class Clock:
    """What a test says that the time is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(
    ("begins", "says", "given_up_after"),
    [
        pytest.param(15.0, None, LINGER_SECONDS, id="heartbeats have ended"),
        pytest.param(60.0, None, LONGEST_ALIVE_SECONDS, id="heartbeats are far apart"),
        pytest.param(15.0, 0.0, LINGER_SECONDS, id="it has said that it ends"),
        pytest.param(0.0, None, None, id="no heartbeats"),
        pytest.param(float("inf"), None, None, id="nonsense"),
        pytest.param(float("nan"), None, None, id="no number"),
    ],
)
def test_only_a_peer_that_says_when_it_is_alive_can_be_known_to_be_gone(
    monkeypatch: pytest.MonkeyPatch, begins: float, says: float | None, given_up_after: float | None
):
    clock = Clock(monkeypatch)
    presence, draining = Presence(), Draining()
    presence.heard("p")
    presence.begins("p", begins)
    if says is not None:
        presence.says("p", says)
    draining.begin(3)
    limits = [0.0, LINGER_SECONDS, LONGEST_ALIVE_SECONDS, 86400.0]
    found = []
    for seconds in limits:
        clock.now = 1000.0 + seconds + 1.0
        found.append(draining.is_given_up(3, ["p"], presence))
    assert found == [given_up_after is not None and seconds >= given_up_after for seconds in limits]
    presence.begins("p", 0.0)  # another process, of which nothing is known
    assert not draining.is_given_up(3, ["p"], presence)


def test_a_round_is_given_up_only_if_all_who_are_awaited_are_gone(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    presence, draining = Presence(), Draining()
    for peer, seconds in (("gone", 15.0), ("busy", 15.0), ("unknown", 0.0)):
        presence.begins(peer, seconds)
    draining.begin(3)
    clock.now += 100.0
    presence.heard("busy")
    assert draining.is_given_up(3, ["gone"], presence) and draining.is_given_up(3, [], presence)
    assert not draining.is_given_up(3, ["gone", "busy"], presence)
    assert not draining.is_given_up(3, ["gone", "unknown"], presence)
    assert not draining.is_given_up(4, ["gone"], presence)


@pytest.mark.slow
def test_draining_awaits_a_peer_without_heartbeats_in_a_long_interval_and_makes_its_round(
    make_service: MakeService, capsys: pytest.CaptureFixture[str]
):
    service = make_service(peers=2)
    service.start()
    assert [peer.wait() for peer in [service.peer(f"p{number}", 1) for number in range(2)]] == [0, 0]
    with service.client("p0", START) as p0, service.client("p1", START) as p1:
        for client in (p0, p1):
            client.start(START)
        p0.upload(2, START)
        assert main(["server", "drain", "--server", service.address]) == 0
        assert "no heartbeats say whether p1 will come: evict whoever will not" in capsys.readouterr().out
        time.sleep(LINGER_SECONDS + 5.0)  # it trains
        assert service.server.exit_code is None
        p1.upload(2, START)
        assert [client.fetch(2, START).number for client in (p0, p1)] == [2, 2]
    assert service.server.wait() == 0
    assert service.events("committed")[-1]["round"] == 2


@pytest.mark.slow
def test_draining_several_servers_ends_all_of_them_though_a_peer_is_gone(make_service: MakeService):
    service = make_service(peers=2)
    cluster = Cluster(service, 2)
    cluster.start_all()
    assert [peer.wait() for peer in [service.peer(f"p{number}", 1) for number in range(2)]] == [0, 0]
    with service.client("p0", START) as client:
        client.start(START)
        client.upload(2, START)
        assert main(["server", "drain", "--server", service.address]) == 0
        assert cluster.servers[0].wait(LINGER_SECONDS + PATIENCE) == 0
        assert cluster.servers[1].wait(LINGER_SECONDS + PATIENCE) == 0
    assert "nothing is heard of p1: the round stays open" in cluster.servers[0].output
    cluster.start_all()
    with service.client("p1", START) as other:
        other.start(START)
        other.upload(2, START)
        assert other.fetch(2, START).number == 2
