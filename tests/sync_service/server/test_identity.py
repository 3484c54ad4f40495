# SPDX-License-Identifier: Apache-2.0
"""A place of a run knows which data it has trained on: a new experiment that meets an old run is told."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.peer.client import SyncClient
from megatron_ext.sync_service.rounds.members import Policy
from megatron_ext.sync_service.rounds.round import RunState
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import start_values

MakeService = Callable[..., Service]
START = start_values(1)


def refusal_of(client: SyncClient) -> str:
    """Return what a peer is told that does not fit."""
    with client, pytest.raises(UserError) as refused:
        client.register()
    return str(refused.value)


def begin(service: Service, data: dict[str, str], *, contribute: bool = True) -> None:
    """Let peers with these data begin the run, contribute to its first round unless told otherwise, and end."""
    with ExitStack() as open_clients:
        clients = [open_clients.enter_context(service.client(name, START, data=of)) for name, of in data.items()]
        for client in clients:
            client.start(START)
        for client in clients if contribute else ():
            client.upload(1, START)
        for client in clients:
            client.leave()


def joins(service: Service, name: str, **options: Any) -> None:
    """Register a peer that fits, and let it leave."""
    with service.client(name, START, **options) as client:
        client.register()
        client.leave()


def restart(service: Service) -> None:
    """Let another server read what the journal says."""
    assert service.server is not None
    service.server.kill(signal.SIGTERM)
    service.server.wait()
    service.start()


def test_a_peer_with_other_data_than_its_place_is_refused_with_both_ways_out(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    begin(service, {"p0": "old"})
    for _ in range(2):  # by the state in memory, and by the journal
        said = refusal_of(service.client("p0", START, data="new"))
        assert "the training data of peer 'p0' are 'new', and its place 0 in run 'demo' has contributed" in said
        assert "from 'old'; give the same" in said
        assert "for a new experiment, a run of another name or another folder of the server" in said
        assert "--sync-service-continue-run" in said and said.count("\n") == 0
        restart(service)
    joins(service, "p0", data="old")
    joins(service, "p9", data="old")  # the place counts, not the name
    assert "peer 'p9'" in refusal_of(service.client("p9", START, data="new"))


def test_a_place_that_continues_a_run_with_other_data_has_these_from_then_on(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    begin(service, {"p0": "old"})
    joins(service, "p0", data="new", continue_run=True)
    restart(service)
    assert "has contributed from 'new'" in refusal_of(service.client("p0", START, data="old"))
    joins(service, "p0", data="new")
    joins(service, "p0")  # who does not say, as one of an earlier release, changes nothing
    assert "has contributed from 'new'" in refusal_of(service.client("p0", START, data="old"))


def test_peers_may_have_data_of_their_own_each(make_service: MakeService):
    service = make_service()
    service.start()
    begin(service, {"p0": "here", "p1": "there"})
    joins(service, "p1", data="there", index=1)
    said = refusal_of(service.client("p1", START, data="here", index=1))
    assert "are 'here', which place 0 has (--sync-service-index), and its place 1 in run 'demo' has contributed" in said


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("ours ours theirs", "the training data of place 2 are 'theirs', and those of all others 'ours'; if all"),
        ("theirs ours ours ours", "the training data of place 0 are 'theirs', and those of all others 'ours'; if all"),
        ("ours ours ours", ""),
        ("here there elsewhere", ""),
        ("ours theirs", ""),
    ],
    ids=["last", "first", "one_corpus", "sites", "two_peers"],
)
def test_a_place_with_other_data_than_all_others_is_named_once(
    make_service: MakeService, caplog: pytest.LogCaptureFixture, data: str, said: str
):
    service = make_service(peers=4)
    service.start()
    with ExitStack() as open_clients:
        clients = [
            open_clients.enter_context(service.client(f"p{place}", START, data=own, index=place))
            for place, own in enumerate(data.split())
        ]
        for client in clients:
            client.register()
        joins(service, "p1", data=data.split()[1], index=1, take_over=True)
    differing = [line for line in service.output.splitlines() if "training data of place" in line]
    told = [record.getMessage() for record in caplog.records if "training data of place" in record.getMessage()]
    assert len(differing) == bool(said) and all(said in line for line in differing)
    # Who comes first cannot be told yet.
    assert len(told) == ("place 2" in said) and all(said in line for line in told)


@pytest.mark.parametrize("data", ["x" * 257, "two\nlines"], ids=["too long", "two lines"])
def test_what_the_data_are_is_said_in_a_short_line(make_service: MakeService, data: str):
    with pytest.raises(UserError, match=rf"data has {len(data)} characters; give at most 256 printable ones"):
        make_service().client("p0", START, data=data)


def test_before_the_first_round_any_data_will_do(make_service: MakeService):
    service = make_service()
    service.start()
    joins(service, "p0", data="wrong")
    begin(service, {"p0": "right", "p1": "right"})
    joins(service, "p0", data="right", index=0)


def test_until_a_place_has_contributed_any_data_will_do_also_after_a_round_of_others(make_service: MakeService):
    service = make_service(quorum=1)
    service.start()
    begin(service, {"p0": "ours", "p1": "wrong"}, contribute=False)
    with service.client("p0", START, data="ours", index=0) as client:
        client.start(START)
        client.upload(1, START)
        restart(service)
        joins(service, "p1", data="wrong", index=1)
        joins(service, "p1", data="wrong too", index=1, continue_run=True)  # there is nothing to continue from
        with service.client("p1", START, data="right", index=1) as other:
            other.start(START)
            other.upload(other.round + 1, START)
            other.leave()
    assert "place 0 in run 'demo' has contributed from 'ours'" in refusal_of(
        service.client("p0", START, data="right", index=0)
    )
    for _ in range(2):  # by the state in memory, and by the journal
        assert "place 1 in run 'demo' has contributed from 'right'" in refusal_of(
            service.client("p1", START, data="wrong", index=1)
        )
        restart(service)


def test_a_server_that_dies_as_it_accepts_a_contribution_knows_the_data_of_its_place(make_service: MakeService):
    service = make_service(peers=1)
    server = service.start("upload_journaled:2")  # the common start is the first
    peer = service.peer("p0", 1, options={"data": "old"})
    server.wait()
    peer.kill()
    peer.wait()
    assert not service.events("committed")[1:]  # the next server makes the round at once
    service.start()
    assert "has contributed from 'old'" in refusal_of(service.client("p0", START, data="new"))


def test_a_contribution_of_which_half_came_binds_no_place(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    service.peer("p0", 1, options={"data": "wrong"}, die=[1, "during_upload"]).wait()
    joins(service, "p0", data="right", take_over=True)
    begin(service, {"p0": "right"})
    assert "has contributed from 'right'" in refusal_of(service.client("p0", START, data="wrong"))


def test_the_record_of_a_run_has_the_data_of_its_places():
    state = RunState(Policy(peers=1, quorum=1, grace_seconds=0.0))
    state.apply({"event": "joined", "peer": "p0", "index": 0, "instance": "a", "time": 1.0, "data": "old"})
    committed = {"event": "committed", "digest": "a", "contributors": ["p0"], "rejected": {}, "outer_scalars": {}}
    state.apply({**committed, "round": 0})
    joined = state.as_json()
    state.apply({"event": "uploaded", "round": 1, "peer": "p0"})
    rebuilt = RunState(Policy(peers=1, quorum=1, grace_seconds=0.0))
    rebuilt.apply({"event": "recovered", "round": 0, "state": state.as_json()})
    assert rebuilt.data == {0: "old"} and rebuilt.as_json() == state.as_json()
    rebuilt.apply({"event": "recovered", "round": 0, "state": joined})
    assert rebuilt.data == {}
    rebuilt.apply({"event": "uploaded", "round": 1, "peer": "p0"})  # who it is that contributes is in the record, too
    assert rebuilt.data == {0: "old"}
    former = state.as_json()
    del former["data"], former["members"][0]["data"]  # as an earlier release has written it
    rebuilt.apply({"event": "recovered", "round": 0, "state": former})
    assert rebuilt.data == {}
