# SPDX-License-Identifier: Apache-2.0
"""What one peer may cost a server: every limit is refused by name, and what is just below it is taken."""

import dataclasses
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.sync_service.peer.client import SyncClient
from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.frames import MAX_PAYLOAD, Frame, cut, whole_box
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.config import _LIMITS, RunConfig
from megatron_ext.sync_service.rounds.room import bytes_of_round
from megatron_ext.sync_service.server.config import run_config
from megatron_ext.sync_service.values.contribution import Contribution
from tests.support.every_run import one_of_each
from tests.sync_service.service import REPOSITORY, Service
from tests.sync_service.small_frames import SIDE, catalog_of, dots, pieces
from tests.sync_service.toy_peer import start_values, trained

MakeService = Callable[..., Service]


def contribution(folder: Path, catalog: Catalog, **limits: int) -> Contribution:
    run = RunConfig(peers=1, **limits)
    return Contribution(folder / "p.frames", catalog, "fp32", limits=run.limits)


def upload(client: SyncClient, frames: Sequence[Frame]) -> Any:
    request = wire.Upload(caller=client._membership.caller, round=0, frames=frames)
    who = wire.Upload(caller=request.caller, round=request.round, frames=())
    return client._connection.call("Upload", lambda: iter([who, request]))


@pytest.mark.parametrize(
    ("limit", "good", "bad", "problem"),
    [
        (
            {"max_tensors": 3},
            [(2,)] * 3,
            [(2,)] * 4,
            "the catalog has 4 tensors, and max_tensors of the run is 3; raise it",
        ),
        (
            {"max_tensor_bytes": 4096},
            [(2,), (32, 32)],
            [(2,), (1025,)],
            r"tensor 't1' has .* GiB in fp32, and max_tensor_bytes of the run is 4096 \(.* GiB\); raise it",
        ),
        (
            {"max_model_bytes": 4096},
            [(1023,), (1,)],
            [(1023,), (2,)],
            r"the tensors have .* GiB in fp32, and max_model_bytes of the run is 4096 \(.* GiB\); raise it",
        ),
        (
            {"check_disk": False},
            [(8 << 30,)],
            [(16 << 30,)],
            r"tensor 't0' has 64 GiB in fp32, and max_tensor_bytes of the run is 34359738368 \(32 GiB\); raise it",
        ),
    ],
    ids=["tensors", "bytes of a tensor", "bytes of all", "64 GiB by default"],
)
def test_a_peer_that_announces_too_much_is_refused_by_the_name_of_the_limit(
    make_service: MakeService, limit: dict[str, Any], good: list, bad: list, problem: str
):
    service = make_service(peers=1, **limit)
    service.start()
    with service.client("p0", catalog_of(*bad)) as client, pytest.raises(UserError, match=problem):
        client.register()
    assert not service.events("created")
    with service.client("p0", catalog_of(*good)) as client:
        assert client.register() == 0


def test_what_the_disk_has_no_room_for_is_refused_with_both_numbers(make_service: MakeService):
    catalog = catalog_of(*[(8 << 30,)] * 500)  # 15.6 TiB, which the other limits allow
    disk = os.statvfs("/tmp")
    if disk.f_bavail * disk.f_frsize > 4 * catalog.nbytes:
        pytest.skip("the disk has room for it")
    service = make_service({"a": {"peers": 1}, "b": {"peers": 1, "check_disk": False}})
    service.start()
    said = r"a round of the announced tensors \(1.6e\+04 GiB in fp32\) needs 6.4e\+04 GiB .*, and .* GiB are free in .*"
    with service.client("p0", catalog, run="a") as client, pytest.raises(UserError, match=said):
        client.register()
    with service.client("p0", catalog, run="b") as client:
        assert client.register() == 0


@pytest.mark.parametrize("codec", one_of_each(["fp32", "bf16", "int8"], {2}))
@pytest.mark.parametrize(
    "run", one_of_each([{}, {"outer_optimizer": "sgd"}, {"rounds": "asynchronous"}], {0, 2}), ids=str
)
def test_the_room_of_a_round_is_what_it_takes(make_service: MakeService, run: dict[str, Any], codec: str):
    run = {"peers": 1, **run}
    values = {"w": torch.randn(400, 1000), "v": torch.randn(3000)}
    service = make_service({"demo": run})
    service.start()
    with service.client("p0", values, codec=codec) as client:
        values = client.start(values)
        for number in range(3):
            values = client.sync(trained(values, 0, number)).values
        paths = sorted((service.state / "runs" / "demo" / "snapshots").iterdir())
        kept = sum(path.stat().st_size for path in paths[-2:])
        said = bytes_of_round(RunConfig(**run), Catalog.of_tensors(values), codec, keep_snapshots=1)
    coded = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 128}[codec] * 403000
    assert kept + coded == pytest.approx(said, rel=0.01)


def test_a_contribution_of_too_many_boxes_is_refused_by_name(tmp_path: Path):
    found = contribution(tmp_path, catalog_of((SIDE, SIDE)), max_boxes=10)
    for frame in dots(10):
        assert found.append(frame)
    with pytest.raises(Refusal, match="tensor 't0' comes in more than 10 boxes, which max_boxes of the run allows"):
        found.append(dots(11)[10])
    assert not found.append(dots(1)[0]) and found.frames == 10  # what is there may be sent again


def test_a_contribution_of_too_many_frames_is_refused_by_name(tmp_path: Path):
    found = contribution(tmp_path, catalog_of((SIDE, SIDE)), max_frames=10)
    for frame in pieces(10):
        assert found.append(frame)
    with pytest.raises(Refusal, match="has 10 frames already, as many as max_frames of the run allows; upload larger"):
        found.append(pieces(11)[10])
    assert not found.append(pieces(1)[0]) and found.frames == 10


def test_the_frames_that_the_finest_client_cuts_are_allowed_unless_told_otherwise():
    shapes = [(5000,), (300, 7000), (), (64, 64)]
    ranks = 64  # each with a part of every tensor
    cuts = [cut(max(spec.numel // ranks, 1), 4096) for spec in catalog_of(*shapes)]
    assert ranks * sum(len(list(parts)) for parts in cuts) <= RunConfig(peers=1).limits.frames_of(catalog_of(*shapes))


def test_a_frame_of_few_bytes_and_many_values_is_refused():
    shape = (MAX_PAYLOAD // 4 + 128,)
    for codec in CODECS.own_names[1:]:
        most, more = (
            Frame.make("t0", shape, whole_box(shape), 0, torch.ones(n), codec) for n in (shape[0] - 128, shape[0])
        )
        most.check()
        with pytest.raises(Refusal, match="at most 4194304 are possible"):
            more.check()


def test_a_message_of_too_many_frames_is_refused():
    frame = bytes([pb2.UploadRequest.DESCRIPTOR.fields_by_name["frames"].number << 3 | 2, 0])
    good, bad = (wire.unpack_upload(count * frame) for count in (16384, 16385))
    assert isinstance(good, wire.Upload) and len(good.frames) == 16384
    assert isinstance(bad, wire.Unreadable) and "it has more than 16384 frames" in bad.problem


def test_limits_are_refused_over_the_wire(make_service: MakeService):
    service = make_service(peers=1, max_boxes=100)
    service.start()
    with service.client("p0", catalog_of((SIDE, SIDE))) as client:
        client.register()
        assert upload(client, dots(100)).frames == 100
        with pytest.raises(UserError, match="comes in more than 100 boxes, which max_boxes of the run allows"):
            upload(client, dots(101))


@pytest.mark.parametrize("name", _LIMITS)
def test_a_limit_of_none_is_refused_in_the_configuration(name: str):
    with pytest.raises(UserError, match=f"run r: {name} is 'many'; it must be of type int"):
        run_config({"peers": 1, name: "many"}, "run r")
    assert RunConfig(peers=1, **{name: 0}).problems() == [f"{name} is 0; it must be 1 or more"]
    assert RunConfig(peers=1, **{name: 1}).problems() == []


def test_the_documentation_has_every_limit_with_its_default():
    page = (REPOSITORY / "docs/sync-service-reference.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    for entry in dataclasses.fields(RunConfig):
        if entry.name in (*_LIMITS, "check_disk"):
            assert rows[entry.name].startswith(str(entry.default).lower().replace("none", "none: ")), entry.name


def test_the_hostile_stream_of_a_run_costs_the_server_as_much_as_an_honest_one(make_service: MakeService):
    """6,000 boxes of one element against 6,000 frames of one element, while a peer of another run makes rounds."""
    count, rounds = 6000, 10
    limits = {"peers": 1, "max_frames": count}
    service = make_service({"a": {"peers": 1}, "honest": limits, "hostile": limits})
    server = service.start()
    seconds = []
    values = start_values(1)
    with service.client("a0", values, run="a") as other:
        values = other.start(values)
        for run, frames in (("honest", pieces(count)), ("hostile", dots(count))):
            with service.client("p0", catalog_of((SIDE, SIDE)), run=run) as client:
                client.register()
                before = processor_seconds(server.pid)
                taken: list[int] = []
                stream = threading.Thread(target=lambda: taken.append(upload(client, frames).frames))  # noqa: B023  # joined below
                stream.start()
                for _ in range(rounds):
                    values = other.sync(trained(values, 0, other.round + 1)).values
                stream.join()
                seconds.append(processor_seconds(server.pid) - before)
                assert taken == [count]
    assert other.round == 2 * rounds
    honest, hostile = seconds
    assert hostile < 10 * honest, seconds


def processor_seconds(pid: int) -> float:
    """Return how long processors have worked for a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
