# SPDX-License-Identifier: Apache-2.0
"""A peer's place is its own: no other process gets it while it is alive, nor anybody with another certificate."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.presence import LEAST_SILENCE
from megatron_ext.sync_service.server.config import ServerConfig
from tests.support.waiting import until
from tests.sync_service.authority import Authority
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import start_values

MakeService = Callable[..., Service]
START = start_values(1)
ALIVE = {"heartbeat_seconds": 0.3}


def test_a_process_that_takes_a_live_peers_name_is_refused_and_the_other_one_trains_on(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START, **ALIVE) as client:
        client.start(START)
        time.sleep(1.5)  # it trains, and says nothing but that it is alive
        with (
            service.client("p0", START) as other,
            pytest.raises(UserError, match=r"peer 'p0' is alive in another process.*--sync-service-take-over"),
        ):
            other.start(START)
        assert client.sync(START).number == 1


def test_a_peer_that_was_killed_is_followed_without_a_word_and_one_that_has_left_at_once(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    killed = service.peer("p0", 50, pauses={"3": 600})
    until(lambda: 2 in service.seen("p0"), "two rounds")
    killed.kill()
    with service.client("p0", START, heartbeat_seconds=20.0) as follower:
        follower.start(START)
        assert follower.sync(START).number == 3
    begin = time.monotonic()
    with service.client("p0", START) as next_one:  # the one before has closed, and gives its place away
        next_one.start(START)
    assert time.monotonic() - begin < 30.0  # not the 60 s for which the other one would count as alive


def test_a_peer_that_was_killed_is_known_and_a_round_that_has_its_quorum_does_not_wait_for_it(
    make_service: MakeService, capsys: pytest.CaptureFixture[str]
):
    service = make_service(peers=3, quorum=2, grace_seconds=300.0)
    service.start()
    with service.client("p0", START, **ALIVE) as first, service.client("p1", START, **ALIVE) as second:
        killed = service.peer("p2", 50, pauses={"1": 600})
        first.start(START)
        second.start(START)
        until(lambda: 0 in service.seen("p2"), "the start of the third peer")
        killed.kill()
        begin = time.monotonic()
        other = threading.Thread(target=second.sync, args=(START,))
        other.start()
        assert first.sync(START).number == 1
        other.join()
        assert time.monotonic() - begin < 60.0  # not the grace window
    assert service.events("closed")[-1]["missing"] == ["p2"]
    assert "no heartbeat from peer p2 for" in service.output
    assert main(["server", "status", "--server", service.address]) == 0
    assert "; no heartbeat from p2 for" in capsys.readouterr().out


def test_a_server_that_stood_still_waits_for_those_that_it_could_not_hear(make_service: MakeService):
    service = make_service(peers=2, quorum=1, grace_seconds=300.0)
    service.start()
    with service.client("p0", START, **ALIVE) as first, service.client("p1", START, **ALIVE) as second:
        first.start(START)
        second.start(START)
        waiting = threading.Thread(target=first.sync, args=(START,))
        waiting.start()
        until(lambda: len(service.events("uploaded")) == 2, "the start, and a contribution")
        service.server.kill(signal.SIGSTOP)
        time.sleep(LEAST_SILENCE + 3.0)
        service.server.kill(signal.SIGCONT)
        time.sleep(2.0)
        assert not [event for event in service.events("closed") if event["round"] == 1]
        assert second.sync(START).number == 1
        waiting.join()
    assert service.events("closed")[-1]["missing"] == []


def test_who_says_so_takes_over_and_the_other_one_is_told(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START, **ALIVE) as client:
        client.start(START)
        with service.client("p0", START, take_over=True) as other:
            other.start(START)
            with pytest.raises(UserError, match="another process has registered as peer 'p0' since"):
                client.sync(START)
            assert other.sync(START).number == 1


def test_a_server_that_was_started_again_knows_who_was_alive(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START, heartbeat_seconds=1.0) as client:
        client.start(START)
        service.server.kill()
        service.server.wait()
        service.start()
        with service.client("p0", START) as other, pytest.raises(UserError, match="is alive in another process"):
            other.start(START)
        assert client.sync(START).number == 1


def test_heartbeats_do_not_keep_a_process_from_forking_while_the_server_is_away(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START, heartbeat_seconds=0.01) as client:
        client.start(START)
        for away in (False, True):
            if away:
                service.server.kill(signal.SIGSTOP)
            for _ in range(3):
                child = os.fork()
                if child == 0:
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        service.server.kill(signal.SIGCONT)
        assert client.sync(START).number == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_peers_name_belongs_to_its_certificate_and_only_operators_evict_and_drain(
    make_service: MakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    authority = Authority(tmp_path, "ours")
    own = authority.issue("127.0.0.1")
    theirs = r"peer 'p0' belongs to the certificate of 'site-a'.*shows that of 'site-b'"
    certificates = {name: authority.issue(name) for name in ("site-a", "site-b", "chief")}
    connections = {name: {"tls_ca": authority.file, **files} for name, files in certificates.items()}
    service = make_service(peers=2, quorum=1)
    service.extra = {**own, "tls_client_ca": authority.file, "operators": ["chief"]}
    service.start()

    def flags(files: dict[str, str]) -> list[str]:
        given = {"tls_ca": authority.file, **files}
        words = (word for name, file in given.items() for word in ("--" + name.replace("_", "-"), file))
        return ["--server", service.address, *words]

    with service.client("p0", START, connection=connections["site-a"]) as client:
        client.start(START)
    for restarted in range(2):
        with (
            service.client("p0", START, connection=connections["site-b"], take_over=True) as thief,
            pytest.raises(UserError, match=theirs),
        ):
            thief.start(START)
        with service.client("p0", START, connection=connections["site-a"]) as client:
            client.start(START)
        if not restarted:
            service.server.kill()
            service.server.wait()
            service.start()
    for action in (["evict", "p0"], ["drain"]):
        assert main(["server", *action, *flags(certificates["site-b"])]) == 2
        said = capsys.readouterr().err
        assert "the certificate of 'site-b' may not" in said and "under operators" in said
    assert main(["server", "evict", "p0", *flags(certificates["chief"])]) == 0
    with service.client("p0", START, connection=connections["site-b"]) as freed:
        freed.start(START)
    assert main(["server", "drain", *flags(own)]) == 0  # the server's own certificate
    assert service.server.wait() == 0


def test_operators_and_a_status_page_for_others_need_what_protects_them():
    config = {"dir": "x", "runs": {"r": RunConfig(peers=1)}}
    with pytest.raises(UserError, match=r"operators are names of certificates.*tls_client_ca"):
        ServerConfig(operators=["chief"], **config).check()
    with pytest.raises(UserError, match=r"status_host is 0\.0\.0\.0, which others reach.*--insecure"):
        ServerConfig(status_port=0, status_host="0.0.0.0", **config).check()
    ServerConfig(status_port=0, status_host="0.0.0.0", insecure=True, **config).check()


@pytest.mark.slow
def test_draining_a_server_that_was_started_again_ends_though_a_peer_is_gone_and_blames_it(
    make_service: MakeService, capsys: pytest.CaptureFixture[str]
):
    service = make_service(peers=2)
    service.start()
    peers = [service.peer(f"p{number}", 1) for number in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0]
    service.server.kill()
    service.server.wait()
    service.start()
    with service.client("p0", START) as client:
        client.start(START)
        client.upload(2, START)
        assert main(["server", "drain", "--server", service.address]) == 0
        assert "round 2 needs 1 more of its quorum of 2 (of the members p1 are awaited)" in capsys.readouterr().out
        assert service.server.wait() == 0
    assert "nothing is heard of p1: the round stays open, with what was uploaded for it" in service.output
    service.start()
    with service.client("p1", START) as other:
        other.start(START)
        other.upload(2, START)
        until(lambda: service.events("committed")[-1]["round"] == 2, "the round with what was uploaded before")


@pytest.mark.slow
def test_draining_a_server_whose_peers_train_ends_and_says_that_no_round_is_under_way(
    make_service: MakeService, capsys: pytest.CaptureFixture[str]
):
    service = make_service(peers=1)
    service.start()
    assert service.peer("p0", 1).wait() == 0
    service.server.kill()
    service.server.wait()
    service.start()
    assert main(["server", "drain", "--server", service.address]) == 0
    assert "no round is under way; p0 may still fetch round 1" in capsys.readouterr().out
    assert service.server.wait() == 0
