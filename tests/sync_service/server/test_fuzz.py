# SPDX-License-Identifier: Apache-2.0
"""Bytes that nobody meant to send: refused one by one, whatever they are, and the server continues.

Each test takes a second unless pytest is told how long:

    ./tests/run.sh tests/sync_service/server/test_fuzz.py --fuzz-seconds 600
"""

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.outer.penalty import Verdict
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import MAX_PAYLOAD, Box, Frame, whole_box
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.shards.shard import RoundJob, Uploader
from megatron_ext.sync_service.shards.shard_messages import work_message
from megatron_ext.sync_service.values.contribution import Contribution
from megatron_ext.sync_service.values.decision import Decision
from tests.sync_service.cluster import Cluster
from tests.sync_service.hostile import bytes_of, message_of
from tests.sync_service.service import Service
from tests.sync_service.shard_caller import calling, shard_request, word
from tests.sync_service.toy_peer import start_values
from tests.sync_service.whole_runs import DILOCO, ROUNDS

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]

SHAPES = {"w": (6, 500), "v": (70,), "scale": ()}
CATALOG = Catalog(TensorSpec(name=name, shape=shape, unit=name) for name, shape in SHAPES.items())


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> Iterator[Iterator[random.Random]]:
    """Yield generators of known seeds until the time is over; a failure names the one that it had."""
    seed = 0

    def until_the_end() -> Iterator[random.Random]:
        nonlocal seed
        end = time.monotonic() + float(request.config.getoption("--fuzz-seconds"))
        while seed < 20 or time.monotonic() < end:
            yield random.Random(seed)
            seed += 1

    yield until_the_end()
    print(f"seeds 0 to {seed}")


def frames(codec: str) -> list[Frame]:
    """Return frames of all of the tensors, whole and in parts."""
    found = []
    for name, shape in SHAPES.items():
        box = whole_box(shape)
        found.append(Frame.make(name, shape, box, 0, torch.linspace(-1, 1, box.numel), codec))
    box = Box((1, 3), (2, 256))
    return [*found, Frame.make("w", SHAPES["w"], box, 256, torch.ones(256), codec)]


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Return bytes after one to four accidents."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        size = len(changed)
        at, other = (dice.randrange(size + 1), dice.randrange(size + 1)) if size else (0, 0)
        first, last = min(at, other), max(at, other)
        match dice.randrange(6):
            case 0 if size:
                changed[at % size] ^= 1 << dice.randrange(8)
            case 1:
                changed[at:at] = dice.randbytes(dice.randint(1, 20))
            case 2:
                del changed[first : min(last, first + 50)]
            case 3:
                changed[at:at] = changed[first : min(last, first + 200)]
            case 4:
                # Protobuf's lengths and numbers: the largest, and those that do not end.
                changed[at : at + 10] = dice.choice([b"\xff" * 10, b"\xff" * 9 + b"\x01", b"\x80" * 10, b"\x00" * 10])
            case _:
                changed = changed[:at]
    return bytes(changed)


def test_a_frame_is_whole_or_refused(dice: Iterator[random.Random]) -> None:
    good = [frame for codec in CODECS.own_names for frame in frames(codec)]
    messages = {frame.to_message().SerializeToString(): frame for frame in good}
    for thrown in dice:
        data = damaged(thrown.choice(list(messages)), thrown)
        try:
            frame = Frame.from_bytes(data)
        except Refusal:
            continue
        # Accidents that protobuf does not notice leave a message that says the same.
        assert frame in good, f"{thrown} let through {frame.place}"
        assert frame.values().numel() == frame.count


def test_a_spool_file_gives_back_what_was_written_or_nothing(dice: Iterator[random.Random], tmp_path: Path) -> None:
    path = tmp_path / "peer.frames"
    wholes = {}
    for codec in CODECS.own_names:
        path.unlink(missing_ok=True)
        contribution = Contribution(path, CATALOG, codec)
        for frame in frames(codec)[:-1]:
            contribution.append(frame)
        wholes[codec] = path.read_bytes(), {spec.name: contribution.read(spec) for spec in CATALOG}
        assert contribution.missing(None) is None
    for thrown in dice:
        codec = thrown.choice(CODECS.own_names)
        data, values = wholes[codec]
        path.write_bytes(damaged(data, thrown))
        found = Contribution(path, CATALOG, codec)
        for spec in CATALOG:
            if spec.name not in found._index:
                continue
            assert torch.equal(found.read(spec), values[spec.name])
        # What was lost can be sent again.
        for frame in frames(codec)[:-1]:
            found.append(frame)
        assert found.missing(None) is None
        found.discard()


def requests(name: str, run: str = "garbage", instance: str = "process") -> dict[str, list[bytes]]:
    """Return a peer's good requests by the method that takes them."""
    caller = pb2.Caller(run=run, peer=name, instance=instance)
    catalog = [pb2.TensorSpec(name=spec.name, shape=spec.shape, unit=spec.unit) for spec in CATALOG]
    config = {"codec": "fp32"}
    upload = pb2.UploadRequest(caller=caller, round=0, frames=[frame.to_message() for frame in frames("fp32")[:-1]])
    slices = [pb2.Slice(name="w", start=(1, 0), shape=(2, 500)), pb2.Slice(name="v")]
    knows = {"asynchronous": True, "sharded": True}
    register = {"caller": caller, "protocol": PROTOCOL_VERSION, "config": config, "catalog": catalog, **knows}
    places = {name: pb2.Progress(iteration=2, samples=8, schedule=8, batch=4) for name in ("begin", "now")}
    claims = [pb2.Claim(repeats=True, steps=2, **places), pb2.Claim(round=1, digest="ab", whole=True, **places)]
    found = {
        "Register": [pb2.RegisterRequest(**register), pb2.RegisterRequest(**register, index=1, peers=2)],
        "Upload": [upload, pb2.UploadRequest(caller=caller, round=1)],
        "Commit": [pb2.CommitRequest(caller=caller, round=0, loss=1.0, steps=3)],
        "Await": [pb2.AwaitRequest(caller=caller, round=0), pb2.AwaitRequest(caller=caller, round=1, uploaded=True)],
        "Resume": [pb2.ResumeRequest(caller=caller, claim=claim) for claim in claims],
        "Download": [pb2.DownloadRequest(caller=caller, round=0, slices=slices, since=0)],
        "Heartbeat": [pb2.HeartbeatRequest(caller=caller, alive_seconds=1.0)],
        "Leave": [pb2.LeaveRequest(caller=caller)],
        "Status": [pb2.StatusRequest()],
        "Evict": [pb2.EvictRequest(run=run, peer="x2", reason="why")],
    }
    return {method: [message.SerializeToString() for message in messages] for method, messages in found.items()}


def test_a_server_refuses_what_makes_no_sense_and_continues(
    dice: Iterator[random.Random],
    make_service: Callable[..., Service],
    undisturbed: list[str],
) -> None:
    service = make_service({"demo": {"peers": 2, **DILOCO}, "garbage": {"peers": 2}})
    server = service.start()
    peers_requests = [requests(f"x{number}") for number in range(3)]
    with grpc.insecure_channel(service.address) as channel:
        assert call(channel, "Register", requests("x0")["Register"]) is grpc.StatusCode.OK
        assert call(channel, "Upload", [*requests("x0")["Upload"], b"\xff" * 20]) is grpc.StatusCode.INVALID_ARGUMENT
        for thrown in dice:
            good = thrown.choice(peers_requests)
            method = thrown.choice(list(good))
            # Sometimes a good one, so that the bad ones meet members and open rounds.
            data = [thrown.choice(good[method]) for _ in range(thrown.randint(1, 3))]
            data = [one if thrown.random() < 0.5 else damaged(one, thrown) for one in data]
            code = call(channel, method, data)
            # An exception that nobody expected is UNKNOWN; INTERNAL is what protobuf cannot read.
            assert code is not grpc.StatusCode.UNKNOWN, (thrown, method, service.output[-3000:])
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    assert [event["digest"] for event in service.events("committed")] == undisturbed
    # What it has written down of the other run can be read again.
    server.kill(signal.SIGTERM)
    assert server.wait() == 0, service.output
    service.start()


KNOWN = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
    # Who is not a member waits at a shard for the first server's word, and for a round at the first one.
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
RUNS: dict[str, dict[str, Any]] = {"garbage": {}, "alone": {"rounds": "asynchronous", "outer_optimizer": "sgd"}}
"""Runs to which what makes no sense is sent."""

SECRET = "secret-of-the-servers"
METHODS = [method.name for method in pb2.DESCRIPTOR.services_by_name["SyncService"].methods if method.name != "Drain"]


def drawn(dice: random.Random, method: str, run: str, instance: str) -> list[bytes]:
    """Return messages to a method, with every field drawn from a good one and what makes no sense."""
    if method == "Shard":
        goods = [shard_request(call, good, run) for call, good in shard_requests(run, instance).items()]
    else:
        kind = getattr(pb2, f"{method}Request")
        goods = [kind.FromString(data) for data in requests("x0", run, instance)[method]]
    found = []
    for _ in range(dice.randint(1, 3)):
        good = dice.choice(goods)
        message = good if dice.random() < 0.3 else message_of(dice, type(good), good)
        found.append(bytes_of(dice, message))
    return [one if dice.random() < 0.9 else damaged(one, dice) for one in found]


def shard_requests(run: str, instance: str) -> dict[str, Any]:
    """Return what a first server may ask a shard for; of another run of that name, so that it is not obeyed."""
    config = RunConfig(peers=2, **RUNS[run])
    uploaders = (Uploader(peer="x0", index=0, made_for=0),)
    job = RoundJob(number=0, uploaders=uploaders, outer_scalars={"a": 1.0})
    verdicts = {spec.judged_as: Verdict(accepted=(0,), weights=(1.0,)) for spec in CATALOG}
    decision = Decision(rejected={"x1": "why"}, verdicts=verdicts, coefficients={("w", False): 0.5})
    return {
        "follow": word(["a:1", "b:1"], config, CATALOG, members={"x0": instance}, kept={"x0": 0}, used={"x0": 0}),
        "seal": pb2.Seal(peer="x0", instance=instance, index=0, round=1),
        "measure": work_message(job, None),
        "common_squares": work_message(job, decision),
        "write": work_message(job, decision),
    }


def test_every_field_of_every_message_to_every_server_is_taken_or_refused(
    dice: Iterator[random.Random],
    make_service: Callable[..., Service],
    undisturbed: list[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    service = make_service({"demo": {"peers": 2, **DILOCO}, **{run: {"peers": 2, **RUNS[run]} for run in RUNS}})
    cluster = Cluster(service, 2, shard_secret_file=str(tmp_path / "secret"))
    cluster.start_all()
    start = {spec.name: torch.ones(spec.shape) for spec in CATALOG}
    instances = {}
    for run in RUNS:
        with service.client("x0", CATALOG, run=run, index=0) as client:
            client.start(start)
            instances[run] = client._membership.caller.instance
    with (
        calling(cluster.addresses[0]) as first,
        calling(cluster.addresses[1]) as other,
        calling(cluster.addresses[1], {"secret": SECRET}) as leader,
    ):
        for thrown in dice:
            run, method = thrown.choice(list(RUNS)), thrown.choice(METHODS)
            if thrown.random() < 0.3:
                # Whoever has left or was evicted is a member again, and the next message meets one.
                first.send("Register", requests("x0", run, instances[run])["Register"][0])
            caller = leader if method == "Shard" and thrown.random() < 0.9 else thrown.choice([first, other])
            messages = drawn(thrown, method, run, instances[run])
            code, said = caller.send(method, *messages, seconds=0.3)
            if code is not grpc.StatusCode.OK:
                assert code in KNOWN and 0 < len(said) < 3000, (method, code, said, messages)
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    assert [event["digest"] for event in service.events("committed")] == undisturbed
    # What they have written down of the other runs can be read again.
    for server in cluster.servers.values():
        server.kill(signal.SIGTERM)
        assert server.wait() == 0, server.output
    cluster.start_all()
    with service.client("p0", start_values(7), run="demo") as client:
        client.start(start_values(7))
    said = "".join(process.output for process in service.processes)
    assert "Traceback" not in said and SECRET not in said
    assert not [path for folder in (Path("/"), Path.cwd(), tmp_path) for path in folder.glob("*pwned*")]
    assert not list(tmp_path.rglob("*pwned*"))


def call(channel: Any, method: str, data: list[bytes]) -> Any:
    """Send bytes to a method; return the status that came back."""
    path = f"/megatron_ext.sync.v1.SyncService/{method}"
    try:
        if method == "Upload":
            channel.stream_unary(path)(iter(data), timeout=5)
        elif method == "Download":
            for reply in channel.unary_stream(path)(data[0], timeout=5):
                assert len(reply) < 2 * MAX_PAYLOAD
        else:
            channel.unary_unary(path)(data[0], timeout=5)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK
