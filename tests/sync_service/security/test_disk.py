# SPDX-License-Identifier: Apache-2.0
"""What a peer can make the server write is bounded: one contribution, and a journal's growth between two rounds."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.frames import Frame, whole_box
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from megatron_ext.sync_service.protocol.report import Report
from tests.sync_service.service import Service
from tests.sync_service.shard_caller import ShardCaller, calling
from tests.sync_service.toy_peer import SHAPES, start_values, trained

MakeService = Callable[..., Service]
Code = grpc.StatusCode
START = start_values(1)
HEADS = 1.5
"""Bytes of a contribution in relation to its values: the frames of this test are small, and each has a head."""


def registration(peer: str, instance: str, **config: str) -> bytes:
    """Return the request of a process to speak for a peer."""
    specs = Catalog.of_tensors(START)
    catalog = [pb2.TensorSpec(name=spec.name, shape=spec.shape, unit=spec.unit) for spec in specs]
    caller = pb2.Caller(run="demo", peer=peer, instance=instance)
    request = pb2.RegisterRequest(
        caller=caller, protocol=PROTOCOL_VERSION, config={"codec": "fp32", **config}, catalog=catalog, asynchronous=True
    )
    return bytes(request.SerializeToString())


def uploads(peer: str, instance: str, number: int, fill: float, per_frame: int) -> Iterator[bytes]:
    """Yield messages that bring all values, in frames of that many."""
    caller = pb2.Caller(run="demo", peer=peer, instance=instance)
    yield wire.pack(wire.Upload(caller=caller, round=number, frames=[]))
    for name, shape in SHAPES.items():
        box = whole_box(shape)
        for first in range(0, box.numel, per_frame):
            values = torch.full((min(per_frame, box.numel - first),), fill)
            frame = Frame.make(name, shape, box, first, values)
            yield wire.pack(wire.Upload(caller=caller, round=number, frames=[frame]))


def test_whatever_a_peer_uploads_it_takes_no_more_of_the_disk_than_its_contribution(make_service: MakeService):
    service = make_service({"demo": {"peers": 2, "quorum": 2}})
    server = service.start()
    with service.client("p0", START) as client, calling(service.address) as caller:
        client.start(START)
        assert caller.send("Register", registration("p1", "one"))[0] is Code.OK
        folder = service.state / "runs" / "demo"
        nbytes = 4 * sum(value.numel() for value in START.values())

        def taken() -> int:
            return sum(path.stat().st_size for path in (folder / "spool").rglob("*") if path.is_file())

        most, codes = 0, set()
        for instance in ("one", "two", "three"):
            if instance != "one":
                assert caller.send("Register", registration("p1", instance))[0] is Code.OK
            # Again and again, other values in their place, cut in other ways, to other rounds.
            for number, fill, per_frame in ((1, 1.0, 512), (1, 1.0, 512), (1, 2.0, 512), (1, 3.0, 333), (2, 1.0, 512)):
                for message in uploads("p1", instance, number, fill, per_frame):
                    codes.add(caller.send("Upload", message)[0])
                most = max(most, taken())
        assert Code.OK in codes and Code.INVALID_ARGUMENT in codes
        assert nbytes <= most <= HEADS * nbytes
        # It leaves, and others come in its place: what none of them has committed is gone.
        for name in ("a", "b", "c"):
            leave = pb2.LeaveRequest(caller=pb2.Caller(run="demo", peer="p1", instance="three"))
            if name != "a":
                leave.caller.peer, leave.caller.instance = chr(ord(name) - 1), "one"
            assert caller.send("Leave", leave.SerializeToString())[0] is Code.OK
            assert taken() == 0
            assert caller.send("Register", registration(name, "one"))[0] is Code.OK
            for message in uploads(name, "one", 1, 1.0, 512):
                caller.send("Upload", message)
            assert taken() <= HEADS * nbytes
    assert server.exit_code is None and "Traceback" not in server.output


def test_peers_that_register_again_and_again_do_not_fill_the_disk_with_the_journal(make_service: MakeService):
    limit = 6000
    service = make_service({"demo": {"peers": 2, "quorum": 1, "grace_seconds": 0.1, "max_journal_bytes": limit}})
    server = service.start()
    path = service.state / "runs" / "demo" / "journal.jsonl"

    def flood(caller: ShardCaller) -> tuple[Any, str]:
        for number in range(200):
            code, said = caller.send("Register", registration(f"x{number}", "i"))
            if code is not Code.OK:
                break
            leave = pb2.LeaveRequest(caller=pb2.Caller(run="demo", peer=f"x{number}", instance="i"))
            assert caller.send("Leave", leave.SerializeToString())[0] is Code.OK
        return code, said

    with service.client("p0", START) as client:
        values = client.start(START)
        with calling(service.address) as caller:
            before = path.stat().st_size
            code, said = flood(caller)
            assert code is Code.UNAVAILABLE and f"max_journal_bytes of the run is {limit}" in said
            assert limit <= path.stat().st_size - before < limit + 1000
        # The next server knows it from the journal.
        server.kill()
        server.wait()
        service.start()
        with calling(service.address) as caller:
            assert caller.send("Register", registration("x", "i"))[0] is Code.UNAVAILABLE
            # Who is a member makes its rounds, and after one there is room again.
            values = client.sync(trained(values, 0, 1), Report(steps=1)).values
            assert caller.send("Register", registration("x", "i"))[0] is Code.OK
    assert service.events("committed")[-1]["contributors"] == ["p0"]


def test_peers_that_begin_a_run_again_and_again_do_not_fill_the_disk_either(make_service: MakeService):
    limit = 20_000
    service = make_service({"demo": {"peers": 2, "max_journal_bytes": limit}})
    service.start()
    path = service.state / "runs" / "demo" / "journal.jsonl"
    leave = pb2.LeaveRequest(caller=pb2.Caller(run="demo", peer="x", instance="i")).SerializeToString()
    with calling(service.address) as caller:
        # Before there is a round, who comes to a deserted run says what it is, tensors and all.
        for number in range(100):
            code, said = caller.send("Register", registration("x", "i", said=1000 * str(number)))
            if code is not Code.OK:
                break
            assert caller.send("Leave", leave)[0] is Code.OK
    assert code is Code.UNAVAILABLE and f"max_journal_bytes of the run is {limit}" in said
    assert len(service.events("created")) > 1 and limit <= path.stat().st_size < 1.5 * limit


def test_a_round_adds_a_few_hundred_bytes_for_every_peer_to_the_journal(make_service: MakeService):
    service = make_service({"demo": {"peers": 2, "skip_anomaly": True, "outer_optimizer": "sgd"}})
    service.start()
    peers = [service.peer(f"peer-{index}", 4, options={"index": index}) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    path = service.state / "runs" / "demo" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    ends = [at for at, event in enumerate(service.journal()) if event["event"] == "committed"]
    added = sum(map(len, lines[ends[1] + 1 : ends[-1] + 1])) / (len(ends) - 2)
    assert 2 * 200 < added < 400 + 2 * 300
