# SPDX-License-Identifier: Apache-2.0
"""Requests that make no sense get a status and one sentence that names the field, and change nothing."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest

from megatron_ext.cli.main import main
from megatron_ext.sync_service.peer.client import Report
from megatron_ext.sync_service.protocol.field_checks import Malformed
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from megatron_ext.sync_service.protocol.status_reply import read_status
from tests.sync_service.hostile import variants
from tests.sync_service.other_server import serving
from tests.sync_service.service import Service
from tests.sync_service.shard_caller import ShardCaller, calling
from tests.sync_service.toy_peer import start_values

MakeService = Callable[..., Service]
START = start_values(1)
CODE = grpc.StatusCode
CALLER = pb2.Caller(run="demo", peer="p0", instance="i")
HUGE = (1 << 64) - 1


@pytest.fixture
def service(make_service: MakeService) -> Service:
    found = make_service(peers=2)
    found.start()
    return found


@pytest.fixture
def caller(service: Service) -> Iterator[ShardCaller]:
    with calling(service.address) as found:
        yield found


def tensor(name: str = "w", shape: tuple[int, ...] = (2,), unit: str = "", owners: tuple[int, ...] = ()) -> Any:
    return pb2.TensorSpec(name=name, shape=shape, unit=unit, owners=owners)


def register(by: ShardCaller, **changes: Any) -> tuple[Any, str]:
    good: dict[str, Any] = {
        "caller": CALLER,
        "protocol": PROTOCOL_VERSION,
        "config": {"codec": "fp32"},
        "catalog": [tensor()],
    }
    return by.send("Register", pb2.RegisterRequest(**{**good, **changes}).SerializeToString())


REGISTRATIONS: list[tuple[dict[str, Any], str]] = [
    ({"config": {"codec": "fp32", "x" * 1001: "1"}}, "its name must be 1 to 1000 letters that can be printed"),
    ({"config": {"codec": "fp32", "": "1"}}, "config has a field ''; its name must be"),
    ({"config": {"codec": "fp32", "a\nb": "1"}}, "config has a field 'a\\nb'; its name must be"),
    ({"config": {"codec": "fp32", "a": "1" * 10_001}}, "config field 'a' has 10001 letters; at most 10000"),
    ({"config": {"codec": "fp32", **{str(n): "" for n in range(1000)}}}, "config has 1001 fields; at most 1000"),
    ({"config": {"codec": "y" * 5000}}, "is not known; use one of fp32, bf16"),
    ({"config": {}}, "codec '' is not known"),
    ({"catalog": []}, "the catalog has 0 tensors"),
    ({"catalog": [tensor(), tensor()]}, "tensor 'w' is twice in the catalog"),
    ({"catalog": [tensor("")]}, "'' cannot be the name of a tensor"),
    ({"catalog": [tensor("outer:x")]}, "'outer:x' cannot be the name of a tensor"),
    ({"catalog": [tensor("x" * 1001)]}, "of a tensor must be at most 1000 letters that can be printed"),
    ({"catalog": [tensor("a\0b")]}, "name 'a\\x00b' of a tensor must be at most 1000 letters"),
    ({"catalog": [tensor(unit="u" * 1001)]}, "of a tensor must be at most 1000 letters"),
    ({"catalog": [tensor(shape=(0,))]}, "tensor 'w' has the shape (0,); it must hold elements"),
    ({"catalog": [tensor(shape=(HUGE,))]}, "tensor 'w' has the shape (18446744073709551615,)"),
    ({"catalog": [tensor(shape=(HUGE,) * 16)]}, "tensor 'w' has the shape ("),
    ({"catalog": [tensor(shape=(1,) * 17)]}, "tensor 'w' has 17 axes; at most 16 are possible"),
    ({"catalog": [tensor(shape=(HUGE,) * 200_000)]}, "tensor 'w' has 200000 axes; at most 16"),
    ({"catalog": [tensor(owners=(1, 0))]}, "tensor 'w' has the owners (1, 0); give each once, in order"),
    ({"catalog": [tensor(owners=((1 << 32) - 1,))]}, "tensor 'w' has the owner 4294967295; there are 2 peers"),
    ({"peers": 3}, "peers is 3 at peer 'p0' and 2 in the run"),
    ({"index": (1 << 32) - 1}, "index 4294967295 is asked for, but the run has places 0 to 1"),
    ({"caller": pb2.Caller(run="x" * 100_000, peer="p0", instance="i")}, "is not served here; the runs are: demo"),
    ({"caller": pb2.Caller(run="demo", peer="../" * 10_000, instance="i")}, "cannot be the name of a peer"),
    ({"protocol": 0}, "the peer an earlier one; install the same"),
]


def test_a_registration_that_makes_no_sense_is_refused_with_the_field(service: Service, caller: ShardCaller):
    before = service.journal()
    for changes, problem in REGISTRATIONS:
        code, said = register(caller, **changes)
        assert code in (CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION, CODE.NOT_FOUND), said
        assert problem in said and said.isprintable() and len(said) < 2100
    assert service.journal() == before and "Traceback" not in service.output
    assert register(caller)[0] is CODE.OK


def progress(**changes: Any) -> Any:
    return pb2.Progress(**{"iteration": 1, "samples": 8, "schedule": 8.0, "batch": 8, **changes})


def test_what_a_peer_reports_is_a_count_or_refused(service: Service, caller: ShardCaller):
    assert register(caller)[0] is CODE.OK
    before = service.journal()
    for report, problem in (
        ({"steps": HUGE}, f"steps is {HUGE}; it must be a number of 0 to 9007199254740992"),
        ({"progress": progress(iteration=HUGE)}, "progress.iteration is "),
        ({"progress": progress(samples=1 << 63)}, "progress.samples is "),
        ({"progress": progress(batch=HUGE)}, "progress.batch is "),
        ({"progress": progress(schedule=-1.0)}, "progress.schedule is -1.0; it must be a number of 0 to"),
        ({"progress": progress(schedule=1e300)}, "progress.schedule is 1e+300"),
        ({"progress": progress(schedule=math.nan)}, "progress.schedule is nan"),
        ({"progress": progress(schedule=math.inf)}, "progress.schedule is inf"),
    ):
        request = pb2.CommitRequest(caller=CALLER, round=0, **report)
        code, said = caller.send("Commit", request.SerializeToString())
        assert code is CODE.INVALID_ARGUMENT and problem in said
    request = pb2.CommitRequest(caller=CALLER, round=HUGE, loss=1.0)
    code, said = caller.send("Commit", request.SerializeToString())
    assert code is CODE.FAILED_PRECONDITION and f"round {HUGE} is not open yet" in said
    assert service.journal() == before and "Traceback" not in service.output


def test_a_loss_that_is_non_finite_is_taken_down_as_none(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START) as client:
        client.start(START)
        for number, loss in enumerate((math.nan, math.inf, -math.inf, 1e308), start=1):
            client.sync(START, Report(loss=loss, steps=1))
            assert service.events("uploaded")[number]["loss"] == (loss if math.isfinite(loss) else None)
    assert main(["server", "status", "--json", "--server", service.address]) == 0


def test_a_wait_for_no_number_of_seconds_ends(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START) as client, calling(service.address) as caller:
        client.start(START)
        for seconds in (math.nan, math.inf, -math.inf, -1.0, 5e-324, -0.0):
            # The server has a limit of its own.
            number = 0 if seconds == math.inf else 1
            request = pb2.AwaitRequest(caller=client._membership.caller, round=number, seconds=seconds)
            assert caller.send("Await", request.SerializeToString())[0] is CODE.OK


BOXES: list[tuple[dict[str, Any], str]] = [
    ({"name": "x" * 100_000}, "is not in the catalog of the run"),
    ({"name": "scale", "start": (0,), "shape": (1,)}, "is not in the shape () of tensor 'scale'"),
    ({"name": "embedding", "start": (0,) * 1000, "shape": (1,) * 1000}, "is not in the shape (40, 16)"),
    ({"name": "embedding", "start": (HUGE, 0), "shape": (HUGE, 1)}, "is not in the shape (40, 16)"),
    ({"name": "embedding", "start": (0, 0), "shape": (0, 1)}, "is not in the shape (40, 16)"),
]


def test_a_box_that_is_none_is_refused(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START) as client, calling(service.address) as caller:
        client.start(START)
        for wanted, problem in BOXES:
            request = pb2.DownloadRequest(caller=client._membership.caller, round=0, slices=[pb2.Slice(**wanted)])
            code, said = caller.send("Download", request.SerializeToString())
            assert code is CODE.INVALID_ARGUMENT and problem in said and len(said) < 2100
    assert "Traceback" not in service.output


METHODS = [method.name for method in pb2.DESCRIPTOR.services_by_name["SyncService"].methods]


def test_bytes_that_are_no_message_are_refused_without_a_traceback(service: Service, caller: ShardCaller):
    # The first field of every message is text or a message: half a letter, and a length beyond the end.
    for method, data in product(METHODS, (b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 20)):
        if method in ("Status", "Drain") and data == b"\x0a\x02\xff\xfe":
            continue  # they have no fields, and pass over unknown ones
        code, said = caller.send(method, data)
        assert code is CODE.INVALID_ARGUMENT and "cannot be read" in said, (data, code, said)
    assert "Traceback" not in service.output
    assert main(["server", "status", "--server", service.address]) == 0


def saying(status: Any) -> AbstractContextManager[str]:
    """Serve a server whose status is whatever it was given; gives the address."""
    return serving("Status", pb2.StatusRequest, lambda _request: status)


FOUND = pb2.RunStatus(run="demo", peers=[{"peer": "p0"}], shards=[{"shard": 1}], rejected={"p1": "why"})


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        # Of a server of protocol 4, which says everything in a field with JSON.
        (pb2.StatusReply.FromString(b"\x0a\x02{}"), "it does not say the server's release"),
        (pb2.StatusReply(version="1", runs=[{"run": "\x1b[31m"}]), "runs[0].run is '\\x1b[31m'; it must be"),
        (pb2.StatusReply(version="1", runs=[{"run": "a", "rejected": {"/p": ""}}]), "rejected is '/p'; it must be"),
        (pb2.StatusReply(version="1", runs=[{"run": "a", "open_round": 1 << 60}]), "open_round is 1152921504606846976"),
        (pb2.StatusReply(version="1", runs=[{"run": "a", "peers": [{"peer": ""}]}]), "peers[0].peer is ''; it must be"),
    ],
)
def test_a_status_that_is_none_is_said_in_one_line(capsys: pytest.CaptureFixture[str], status: Any, problem: str):
    with saying(status) as address:
        for action in (["status"], ["status", "--json"], ["evict", "p0"]):
            assert main(["server", *action, "--server", address]) == 2
            error = capsys.readouterr().err
            assert "its answer to Status is none (" in error and problem in error and len(error.splitlines()) == 1


def test_any_other_value_in_any_place_of_a_status_is_shown_or_refused():
    refused = 0
    for status in variants(pb2.StatusReply(version="1", runs=[FOUND])):
        try:
            assert json.dumps(read_status(status))
        except Malformed as problem:
            refused += 1
            assert len(str(problem)) < 300 and str(problem).isprintable()
    assert refused > 50


def test_a_status_of_a_later_release_may_say_more(service: Service, capsys: pytest.CaptureFixture[str]):
    status = pb2.StatusReply(version="9", runs=[FOUND]).SerializeToString()
    later = pb2.StatusReply.FromString(status + b"\xa2\x06\x02{}")
    with saying(later) as address:
        assert main(["server", "status", "--server", address]) == 0
        assert "run demo: newest round none yet" in capsys.readouterr().out


def test_a_status_in_json_has_every_field(make_service: MakeService, capsys: pytest.CaptureFixture[str]):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START) as client:
        client.start(START)
        assert main(["server", "status", "--json", "--server", service.address]) == 0
    status = json.loads(capsys.readouterr().out)
    (run,) = status["runs"]
    (peer,) = run["peers"]
    fields = [{field.name for field in kind.DESCRIPTOR.fields} for kind in (pb2.RunStatus, pb2.PeerStatus)]
    assert [set(run), set(peer)] == fields and set(status) == {"version", "runs"}
    assert run["newest_round"] == 0 and run["contributors"] == ["p0"] and peer["last_seen"] > 0
