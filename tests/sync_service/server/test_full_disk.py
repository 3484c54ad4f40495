# SPDX-License-Identifier: Apache-2.0
"""A disk that is full: the server says so and waits for room, and no half-written file counts."""

from collections.abc import Callable

import pytest
import torch

from megatron_ext.cli.main import main
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import SHAPES, digest, start_values
from tests.sync_service.whole_runs import DILOCO, check_history

MakeService = Callable[..., Service]


def test_a_full_disk_stops_the_round_until_there_is_room(make_service: MakeService):
    service = make_service(**DILOCO)
    # Uploads fit under this limit, and a snapshot with its momentum does not.
    size = 4 * sum(torch.zeros(shape).numel() for shape in SHAPES.values())
    server = service.start(file_size=size + 20_000)
    peers = [service.peer(f"p{index}", 2, options={"index": index}) for index in range(2)]
    until(lambda: "cannot be written" in service.output, "the server's complaint")
    assert [event["round"] for event in service.events("committed")] == [0]
    assert not list((service.state / "runs/demo/snapshots").glob("*.partial"))
    server.limit_files(-1)
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    check_history(service, 2)


def test_a_disk_too_full_for_uploads_makes_peers_wait(make_service: MakeService, capsys: pytest.CaptureFixture[str]):
    service = make_service(peers=1)
    server = service.start(file_size=30_000)
    peer = service.peer("p0", 1)
    until(lambda: "RESOURCE_EXHAUSTED" in peer.output, "the peer's complaint")

    def status() -> str:
        assert main(["server", "status", "--server", service.address]) == 0
        return capsys.readouterr().out

    # Another stream's frames may still have room, which ends the problem until the next ones have none.
    until(lambda: "PROBLEM: what peers send cannot be written: " in status(), "the problem in the status")
    assert "what peers send cannot be written: " in service.output
    server.limit_files(-1)
    assert peer.wait() == 0, peer.output
    assert "cannot be written" not in status()
    # What was written by half has left no trace.
    assert not service.events("forgotten")
    check_history(service, 1)


def test_a_journal_that_cannot_be_written_lets_nothing_happen(make_service: MakeService):
    service = make_service(peers=1)
    server = service.start()
    journal = service.state / "runs/demo/journal.jsonl"
    server.limit_files(journal.stat().st_size + 10)
    start = start_values(1)
    before = journal.read_bytes()
    options = {"connection": {"token_file": None}}
    with service.client("p0", start, **options) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client._connection._open_line().start(
                "Register",
                pb2.RegisterRequest(
                    caller=client._membership.caller,
                    protocol=PROTOCOL_VERSION,
                    config={"codec": "fp32"},
                    catalog=[pb2.TensorSpec(name="w", shape=[3])],
                ),
                timeout=20,
            )
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert journal.read_bytes() == before
        server.limit_files(-1)
        assert digest(client.start(start)) == digest(start)
