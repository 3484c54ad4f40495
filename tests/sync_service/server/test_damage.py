# SPDX-License-Identifier: Apache-2.0
"""Damaged frames and files: they are refused by name, or asked for again, and change no bit."""

import json
import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.streams import Streams
from megatron_ext.sync_service.peer.parts import Part, whole_parts
from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Box
from megatron_ext.sync_service.protocol.protocol import grpc, pb2
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import digest, start_values, trained

MakeService = Callable[..., Service]


def test_corrupted_duplicated_and_reordered_frames_change_no_bit(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    start = start_values(1)
    with service.client("p0", start) as client:
        client.start(start)
        sent = trained(start, 0, 1)
        (parts,) = client._outgoing.jobs(1, 0, 1 << 30)
        client._outgoing.begin(1, client.index)
        messages = [frame for batch in client._outgoing.batches(1, parts, sent) for frame in batch]
        payload = bytearray(messages[3].payload)
        payload[-1] ^= 1
        damaged = replace(messages[3], payload=bytes(payload))

        def upload(frames: list) -> None:
            request = wire.Upload(caller=client._membership.caller, round=1, frames=frames)
            client._connection.send("Upload", iter([request]), Streams(client._pool))

        with pytest.raises(grpc.RpcError) as caught:
            upload([messages[0], damaged, messages[1]])
        assert caught.value.code() == grpc.StatusCode.DATA_LOSS
        assert "checksum is wrong" in caught.value.details() and "tensor" in caught.value.details()
        reply = client._connection.call("Commit", pb2.CommitRequest(caller=client._membership.caller, round=1))
        assert "is not whole" in reply.missing
        for message in reversed(messages):
            upload([message, message])
        outcome = client.sync(sent)
        assert outcome.contributed and digest(outcome.values) == digest(sent)


@pytest.mark.parametrize("held", ["tensors", "parts"])
def test_a_snapshot_damaged_on_the_servers_disk_is_refused_by_whoever_takes_it(make_service: MakeService, held: str):
    service = make_service(peers=1)
    service.start()
    start = start_values(1)
    with service.client("p0", start) as first:
        first.start(start)
    (path,) = (service.state / "runs" / "demo" / "snapshots").iterdir()
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"damage")
    catalog = Catalog.of_tensors(start)
    parts = None if held == "tensors" else [part for spec in catalog for part in columns(spec)]
    with (
        service.client("p0", catalog, parts=parts) as again,
        pytest.raises(UserError, match="snapshot on the server is"),
    ):
        again.start({})


def columns(spec: TensorSpec) -> list[Part]:
    """Return what two processes of a tensor parallel group hold of a tensor."""
    if len(spec.shape) < 2:
        return list(whole_parts(Catalog([spec])))
    half, rows = spec.shape[-1] // 2, spec.shape[:-1]
    zeros = (0,) * len(rows)
    boxes = Box((*zeros, 0), (*rows, half)), Box((*zeros, half), (*rows, spec.shape[-1] - half))
    return [Part(key=f"{spec.name}{box.start}", spec=spec, box=box) for box in boxes]


def test_a_momentum_damaged_on_the_servers_disk_makes_no_round(make_service: MakeService):
    service = make_service(peers=1, outer_optimizer="sgd")
    service.start()
    start = start_values(1)
    with service.client("p0", start) as client:
        values = client.start(start)
        values = client.sync(trained(values, 0, 1)).values
        path = service.state / "runs/demo/snapshots" / "round-00000001.safetensors"
        whole = path.read_bytes()
        head = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
        name = next(name for name in head if name.startswith("outer:momentum_buffer:"))
        at = 8 + int.from_bytes(whole[:8], "little") + head[name]["data_offsets"][0]
        path.write_bytes(whole[:at] + b"\0\0\x80\x7f" + whole[at + 4 :])  # infinity
        client.upload(2, trained(values, 0, 2))
        until(lambda: f"{name!r} is damaged on the disk" in service.output, "the server's complaint")
        assert [event["round"] for event in service.events("committed")] == [0, 1]
        service.server.kill()
        service.server.wait()
        path.write_bytes(whole)
        service.start()
        assert client.fetch(2, trained(values, 0, 2)).number == 2


@pytest.mark.parametrize("damaged", ["layer.1.weight", "outer:momentum_buffer:scale"])
def test_a_server_refuses_to_start_from_damaged_values_and_no_peer_ends_for_it(
    make_service: MakeService, damaged: str
):
    service = make_service(peers=1, outer_optimizer="sgd")
    service.start()
    peer = service.peer("p0", 2, pauses={"2": 3.0})
    until(lambda: 1 in service.seen("p0"), "the first round")
    service.server.kill()
    service.server.wait()
    path = service.state / "runs/demo/snapshots" / "round-00000001.safetensors"
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    at = begin + json.loads(whole[8:begin])[damaged]["data_offsets"][0]
    path.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
    assert service.start().wait() == 2
    assert f"{path}: {damaged!r} is damaged on the disk; restore the file from a copy" in service.output
    assert "Traceback" not in service.output
    path.write_bytes(whole)
    service.start()
    assert peer.wait() == 0, peer.output


def test_a_server_refuses_to_start_from_values_that_lack_a_tensor(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    assert service.peer("p0", 1).wait() == 0
    service.server.kill()
    service.server.wait()
    path = service.state / "runs/demo/snapshots" / "round-00000001.safetensors"
    # As of a release whose heads had no checksum.
    path.write_bytes(path.read_bytes().replace(b'"head_crc32"', b'"some_other"', 1).replace(b'"scale"', b'"scald"', 1))
    assert service.start().wait() == 2
    assert f"{path}: lacks tensor 'scale'; restore the file from a copy" in service.output


def test_a_contribution_damaged_on_the_servers_disk_is_uploaded_again(make_service: MakeService):
    service = make_service()
    service.start()
    peers = [
        service.peer("p0", 1, options={"index": 0}),
        service.peer("p1", 1, options={"index": 1}, pauses={"1": 2.0}),
    ]
    until(lambda: [e for e in service.events("uploaded") if e["round"] == 1], "the first upload")
    (path,) = (service.state / "runs/demo/spool/round-00000001").glob("p0.*.frames")
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    assert service.events("forgotten")[0]["peer"] == "p0"
    assert service.events("committed")[1]["contributors"] == ["p0", "p1"]
    assert service.seen("p0")[1]["digest"] == service.seen("p1")[1]["digest"]
