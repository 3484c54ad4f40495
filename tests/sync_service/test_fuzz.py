# SPDX-License-Identifier: Apache-2.0
"""Bytes that nobody meant to send: refused one by one, whatever they are, and the server goes on.

Each test takes a second unless pytest is told how long:

    ./tests/run.sh tests/sync_service/test_fuzz.py --fuzz-seconds 600
"""

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.contribution import Contribution
from megatron_ext.sync_service.frames import CODECS, MAX_PAYLOAD, Box, Frame, whole_box
from megatron_ext.sync_service.protocol import PROTOCOL_VERSION, grpc, pb2
from megatron_ext.sync_service.refusal import Refusal
from tests.sync_service.service import Service
from tests.sync_service.test_faults import DILOCO, ROUNDS, undisturbed  # noqa: F401  # a fixture

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
                # Protobuf's lengths and numbers: the largest, and those that go on and on.
                changed[at : at + 10] = dice.choice([b"\xff" * 10, b"\xff" * 9 + b"\x01", b"\x80" * 10, b"\x00" * 10])
            case _:
                changed = changed[:at]
    return bytes(changed)


def test_a_frame_is_whole_or_refused(dice: Iterator[random.Random]) -> None:
    good = [frame for codec in CODECS for frame in frames(codec)]
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
    for codec in CODECS:
        path.unlink(missing_ok=True)
        contribution = Contribution(path, CATALOG, codec)
        for frame in frames(codec)[:-1]:
            contribution.append(frame)
        wholes[codec] = path.read_bytes(), {spec.name: contribution.read(spec) for spec in CATALOG}
        assert contribution.missing(None) is None
    for thrown in dice:
        codec = thrown.choice(CODECS)
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


def requests(name: str) -> dict[str, list[bytes]]:
    """Return a peer's good requests by the method that takes them."""
    caller = pb2.Caller(run="garbage", peer=name, instance="process")
    catalog = [pb2.TensorSpec(name=spec.name, shape=spec.shape, unit=spec.unit) for spec in CATALOG]
    config = {"codec": "fp32"}
    upload = pb2.UploadRequest(caller=caller, round=0, frames=[frame.to_message() for frame in frames("fp32")[:-1]])
    slices = [pb2.Slice(name="w", start=(1, 0), shape=(2, 500)), pb2.Slice(name="v")]
    register = {"caller": caller, "protocol": PROTOCOL_VERSION, "config": config, "catalog": catalog}
    found = {
        "Register": [pb2.RegisterRequest(**register), pb2.RegisterRequest(**register, index=1, peers=2)],
        "Upload": [upload, pb2.UploadRequest(caller=caller, round=1)],
        "Commit": [pb2.CommitRequest(caller=caller, round=0, loss=1.0, steps=3, can_repeat=True)],
        "Await": [pb2.AwaitRequest(caller=caller, round=0), pb2.AwaitRequest(caller=caller, round=1, uploaded=True)],
        "Download": [pb2.DownloadRequest(caller=caller, round=0, slices=slices, since=0)],
        "Leave": [pb2.LeaveRequest(caller=caller)],
        "Status": [pb2.StatusRequest()],
        "Evict": [pb2.EvictRequest(run="garbage", peer="x2", reason="why")],
    }
    return {method: [message.SerializeToString() for message in messages] for method, messages in found.items()}


def test_a_server_refuses_what_makes_no_sense_and_goes_on(
    dice: Iterator[random.Random],
    make_service: Callable[..., Service],
    undisturbed: list[str],  # noqa: F811  # the fixture
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
