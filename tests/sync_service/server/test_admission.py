# SPDX-License-Identifier: Apache-2.0
"""Who gets in and who does not, and what people can do about it: real server, over the wire."""

import json
import signal
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.streams import Streams
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_head import RECORD
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.checksum import crc32
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from megatron_ext.sync_service.rounds.journal import Journal
from megatron_ext.sync_service.rounds.run_record import RunRecord
from megatron_ext.sync_service.server.process import _try_out
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import digest, start_values, trained

MakeService = Callable[..., Service]
START = start_values(1)


def test_what_does_not_fit_the_run_is_refused_with_the_field(make_service: MakeService):
    service = make_service()
    service.start()
    service.client("p0", START, agreed={"sync_interval": "100"}).register()
    other_shape = {**START, "layer.0.bias": torch.zeros(25)}
    renamed = {name.replace("layer.1", "layer.2"): value for name, value in START.items()}
    for values, options, problem in (
        (START, {"run": "other"}, "run 'other' is not served here; the runs are: demo"),
        (START, {"agreed": {"sync_interval": "50"}}, "config field 'sync_interval' is '50' at peer 'p1' and '100'"),
        (START, {}, "config field 'sync_interval' is None at peer 'p1' and '100' in the run"),
        (START, {"agreed": {"sync_interval": "100"}, "codec": "bf16"}, "config field 'codec' is 'bf16'"),
        (START, {"agreed": {"sync_interval": "100"}, "peers": 3}, "peers is 3 at peer 'p1' and 2 in the run"),
        (START, {"agreed": {"sync_interval": "100"}, "index": 0}, "index 0 is asked for, but peer 'p0' has it"),
        (
            other_shape,
            {"agreed": {"sync_interval": "100"}},
            r"shape of tensor 'layer.0.bias' is \(25,\) instead of \(24,\)",
        ),
        (renamed, {"agreed": {"sync_interval": "100"}}, "tensor 'layer.1.weight' has 'layer.2.weight' in its place"),
        ({"scale": START["scale"]}, {"agreed": {"sync_interval": "100"}}, "'embedding' has 'scale' in its place"),
    ):
        with service.client("p1", values, **options) as client, pytest.raises(UserError, match=problem):
            client.register()
    assert [event["peer"] for event in service.events("joined")] == ["p0"]
    assert service.client("p1", START, agreed={"sync_interval": "100"}).register() == 0


def owned(*owners: tuple[int, ...]) -> Catalog:
    """A catalog of experts that these peers own."""
    return Catalog(
        TensorSpec(name=f"expert.{number}", shape=(4,), unit="layer", owners=each) for number, each in enumerate(owners)
    )


def test_peers_that_share_out_the_experts_in_another_way_are_refused(make_service: MakeService):
    service = make_service()
    service.start()
    service.client("p0", owned((0,), (0,), (1,))).register()
    for catalog, problem in (
        (owned((0,), (1,), (1,)), r"owners of tensor 'expert.1' is \(1,\) instead of \(0,\)"),
        (owned((0,), (0,)), "it has 2 tensors instead of 3"),
    ):
        with service.client("p1", catalog) as client, pytest.raises(UserError, match=problem):
            client.register()
    assert service.client("p1", owned((0,), (0,), (1,))).register() == 0


def test_an_owner_that_there_is_not_is_refused(make_service: MakeService):
    service = make_service()
    service.start()
    problem = "tensor 'expert.1' has the owner 2; there are 2 peers"
    with service.client("p0", owned((0,), (2,))) as client, pytest.raises(UserError, match=problem):
        client.register()


def test_values_of_the_wrong_shape_or_type_are_refused_before_they_are_sent(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START) as client:
        client.start(START)
        for name, value, problem in (
            ("scale", torch.zeros(2), r"tensor 'scale' is torch.float32 of shape \(2,\)"),
            ("scale", torch.zeros((), dtype=torch.bfloat16), "tensor 'scale' is torch.bfloat16"),
        ):
            with pytest.raises(UserError, match=problem):
                client.sync({**START, name: value})
        with pytest.raises(UserError, match="tensor 'scale' of the catalog is not among the values"):
            client.sync({name: value for name, value in START.items() if name != "scale"})


def test_a_peer_of_another_release_is_refused(make_service: MakeService):
    service = make_service()
    service.start()
    with service.client("p0", START) as client:
        request = pb2.RegisterRequest(caller=client._membership.caller, protocol=99)
        said = f"speaks protocol {PROTOCOL_VERSION}, the peer 99; install the same release"
        with pytest.raises(UserError, match=said):
            client._connection.call("Register", request)


def test_names_that_are_no_file_names_are_refused(make_service: MakeService):
    service = make_service()
    service.start()
    with service.client("p0", START) as client:
        for name in ("", "../x", ".hidden", "a/b", "x" * 65, "a\nb"):
            for field in ("peer", "instance"):
                caller = pb2.Caller(**{"run": "demo", "peer": "p0", "instance": "i", field: name})
                request = pb2.RegisterRequest(caller=caller, protocol=PROTOCOL_VERSION, config={"codec": "fp32"})
                with pytest.raises(UserError, match="cannot be the name of a"):
                    client._connection.call("Register", request)


def test_silent_calls_without_a_token_hold_nobody_up(make_service: MakeService, tmp_path: Path):
    def silent() -> Iterator[Any]:
        over.wait()
        yield from ()

    (tmp_path / "token").write_text("token-0123456789\n")
    service = make_service(peers=1)
    service.extra = {"token_file": str(tmp_path / "token")}
    service.start()
    over = threading.Event()
    with grpc.insecure_channel(service.address) as channel:
        uploads = channel.stream_unary("/megatron_ext.sync.v1.SyncService/Upload")
        # More than the server has threads for a run of one peer.
        calls = [uploads.future(silent()) for _ in range(140)]
        until(lambda: all(call.done() for call in calls), "the refusals")
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        assert main(["server", "status", "--server", service.address, "--token-file", str(tmp_path / "token")]) == 0
        over.set()


def test_a_wait_of_no_number_of_seconds_ends_at_once(make_service: MakeService):
    service = make_service(peers=2)
    service.start()
    with service.client("p0", START) as client, service.client("p1", START) as other:
        client.start(START)
        other.start(START)
        client.upload(1, START)
        caller = client._membership.caller
        request = pb2.AwaitRequest(caller=caller, round=1, uploaded=True, seconds=float("nan"))
        answer = client._connection.call("Await", request, seconds=20.0)
        assert answer.state == pb2.AwaitReply.WAITING


def test_a_wrong_token_gets_nowhere(make_service: MakeService, tmp_path: Path):
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"{name}-token-0123456789\n")
    service = make_service(peers=1)
    service.extra = {"token_file": str(tmp_path / "right")}
    service.start()
    for token in (None, str(tmp_path / "wrong")):
        with (
            service.client("p0", START, connection={"token_file": token}) as client,
            pytest.raises(UserError, match="the token is missing or wrong"),
        ):
            client.register()
        with service.client("p0", START, connection={"token_file": token}) as client:
            nothing = wire.Upload(caller=pb2.Caller(), round=0, frames=[])
            for method, request in (("Upload", iter([nothing] * 3)), ("Download", pb2.DownloadRequest())):
                with pytest.raises(grpc.RpcError) as caught:
                    list(client._connection.stream(method, request, Streams(client._pool)))
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        for action in (["status"], ["drain"], ["evict", "p0", "--run", "demo"]):
            flags = ["--server", service.address, *(["--token-file", token] if token else [])]
            assert main(["server", *action, *flags]) == 2
    with service.client("p0", START, connection={"token_file": str(tmp_path / "right")}) as client:
        values = client.start(START)
        sent = trained(values, 0, 1)
        assert digest(client.sync(sent).values) == digest(sent)
    assert service.server is not None and service.server.exit_code is None


def test_a_token_that_was_replaced_opens_nothing_after_a_new_start(make_service: MakeService, tmp_path: Path):
    former, token = tmp_path / "former", tmp_path / "token"
    for file in (former, token):
        file.write_text("former-token-0123456789\n")
    service = make_service(peers=1)
    service.extra = {"token_file": str(token)}
    service.start()
    with service.client("p0", START, connection={"token_file": str(former)}) as client:
        values = client.start(START)
        client.sync(trained(values, 0, 1))
    token.write_text("other-token-0123456789\n")
    service.stop()
    service.start()
    with (
        service.client("p0", START, connection={"token_file": str(former)}) as client,
        pytest.raises(UserError, match="the token is missing or wrong"),
    ):
        client.register()
    with service.client("p0", START, connection={"token_file": str(token)}) as client:
        client.start(START)
        assert client.round == 1


def test_a_second_process_takes_a_peers_place_and_the_first_is_told(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START) as first, service.client("p0", START) as second:
        first.start(START)
        second.start(START)
        with pytest.raises(UserError, match="another process has registered as peer 'p0'"):
            first.sync(START)
        assert second.sync(START).contributed


def test_status_evict_and_drain(make_service: MakeService, capsys: pytest.CaptureFixture[str]):
    service = make_service({"demo": {"peers": 2, "quorum": 1, "grace_seconds": 30}})
    service.start()
    flags = ["--server", service.address]
    with service.client("p0", START) as p0, service.client("p1", START) as p1:
        p0.start(START)
        p1.start(START)
        p0.upload(1, START)
        assert main(["server", "status", "--json", *flags]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert run["open_round"] == 1 and run["waiting_for"] == "round 1 awaits p1"
        assert [(peer["peer"], peer["uploaded"]) for peer in run["peers"]] == [("p0", True), ("p1", False)]
        assert main(["server", "evict", "p2", *flags]) == 2
        assert "has no peer 'p2'; its peers are: p0, p1" in capsys.readouterr().err
        assert main(["server", "evict", "p1", "--reason", "too slow", *flags]) == 0
        # Nobody else is awaited: the round closes without the 30 seconds.
        assert p0.fetch(1, START).contributors == ("p0",)
        with pytest.raises(UserError, match="peer 'p1' was evicted: too slow; a new process of that name may register"):
            p1.sync(START)
        assert main(["server", "status", *flags]) == 0
        assert "newest round 1" in capsys.readouterr().out
        p0.upload(2, START)
        assert main(["server", "drain", *flags]) == 0
        assert p0.fetch(2, START).number == 2
        assert service.server is not None and service.server.wait() == 0
    assert main(["server", "status", *flags]) == 2
    assert "has not answered Status for 5 s" in capsys.readouterr().err
    service.start()
    assert service.events("committed")[-1]["round"] == 2


def test_a_drain_that_waits_for_a_round_is_said_everywhere(
    make_service: MakeService, capsys: pytest.CaptureFixture[str]
):
    service = make_service(peers=2)
    server = service.start()
    flags = ["--server", service.address]
    with service.client("p0", START) as p0, service.client("p1", START) as p1:
        p0.start(START)
        p1.start(START)
        p0.upload(1, START)
        assert main(["server", "drain", *flags]) == 0
        assert "SIGTERM ends the server at once" in capsys.readouterr().out
        assert main(["server", "status", *flags]) == 0
        assert "the server is draining; round 1 needs 1 more" in capsys.readouterr().out
        assert "run demo: draining; round 1 needs 1 more" in server.output
        server.kill(signal.SIGTERM)
        assert server.wait() == 0


def test_the_reason_of_an_eviction_is_a_short_line(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START) as client:
        client.start(START)
        reason = "line\n\x1b[31mred " + "x" * 3000
        assert main(["server", "evict", "p0", "--reason", reason, "--server", service.address]) == 0
        with pytest.raises(UserError) as caught:
            client.sync(START)
    said = str(caught.value)
    assert "was evicted: line  [31mred xxx" in said and len(said) < 600 and said.isprintable()


def test_a_server_that_is_told_to_end_ends_at_once_and_resumes_later(make_service: MakeService):
    service = make_service()
    server = service.start()
    peers = [service.peer(f"p{index}", 3, pauses={"2": 1.5}) for index in range(2)]
    until(lambda: [e for e in service.events("committed") if e["round"] == 1], "round 1")
    server.kill(signal.SIGTERM)
    assert server.wait(20) == 0
    service.start()
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]


def test_two_servers_do_not_share_a_folder_or_a_port(make_service: MakeService):
    service = make_service()
    service.start()
    second = service.start()
    assert second.wait() == 2 and "another server uses it" in second.output
    other = make_service()
    other.address = service.address
    assert other.start().wait() == 2
    # One sentence: gRPC would say the same in lines of its own.
    wanted = f"bind {service.address}: cannot listen there: Address already in use; stop who does, or give another"
    assert [line for line in other.output.splitlines() if "listen" in line or "bind" in line or "E0000" in line] == [
        next(line for line in other.output.splitlines() if wanted in line)
    ]


def test_an_address_of_another_machine_is_refused_by_name(make_service: MakeService):
    service = make_service()
    service.address, service.extra = "203.0.113.7:0", {"insecure": True}
    server = service.start()
    assert server.wait() == 2 and "bind 203.0.113.7:0: cannot listen there: Cannot assign" in server.output


def test_a_name_may_have_an_address_that_is_not_available(monkeypatch: pytest.MonkeyPatch):
    asked = socket.getaddrinfo

    def with_another_machines(*args: Any, **kwargs: Any) -> Any:
        return asked("203.0.113.7", 0, type=socket.SOCK_STREAM) + asked("127.0.0.1", 0, type=socket.SOCK_STREAM)

    monkeypatch.setattr(socket, "getaddrinfo", with_another_machines)
    _try_out("localhost", 0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: asked("203.0.113.7", 0, type=socket.SOCK_STREAM))
    with pytest.raises(UserError, match="cannot listen there: Cannot assign"):
        _try_out("localhost", 0)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"bind nowhere\.invalid:1: cannot listen there: "):
        _try_out("nowhere.invalid", 1)


@pytest.mark.parametrize("end", ["left", "evicted"])
def test_what_a_peer_has_said_wrong_is_forgotten_when_it_goes_before_there_is_a_round(
    make_service: MakeService, end: str
):
    service = make_service()
    server = service.start()
    with service.client("typo", {"scale": START["scale"]}, codec="bf16", agreed={"sync_interval": "1"}) as client:
        client.register()
        if end == "left":
            client.leave()
        else:
            assert main(["server", "evict", "typo", "--run", "demo", "--server", service.address]) == 0
    peers = [service.peer(f"p{index}", 1) for index in range(2)]
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    server.kill(signal.SIGTERM)
    server.wait()
    # The next server reads the same in the journal.
    service.start()
    with (
        service.client("p0", START, agreed={"sync_interval": "1"}) as client,
        pytest.raises(UserError, match="config field"),
    ):
        client.register()


def test_what_the_first_peer_has_said_holds_while_anybody_is_there(make_service: MakeService):
    service = make_service(peers=3)
    service.start()
    with service.client("p0", START, codec="bf16") as first, service.client("p1", START, codec="bf16") as second:
        first.register()
        second.register()
        first.leave()
        with service.client("p2", START) as client, pytest.raises(UserError, match="config field 'codec' is 'fp32'"):
            client.register()


def begun_and_stopped(make_service: MakeService, peers: int) -> Service:
    """Return a service whose run has begun, and whose server has ended."""
    service = make_service(peers=peers)
    server = service.start()
    with service.client("p0", START) as client:
        client.start(START)
    server.kill(signal.SIGTERM)
    server.wait()
    return service


def rewrite_protocol(service: Service, protocol: int | None) -> None:
    """Let the journal of a run that has begun be one of another release, and its snapshot tell of that journal."""
    journal = service.state / "runs" / "demo" / "journal.jsonl"
    before = journal.read_bytes()
    events = [json.loads(line) for line in before.splitlines()]
    for event in events:
        del event["crc"]
    (created,) = (event for event in events if event["event"] == "created")
    assert created.pop("protocol") == PROTOCOL_VERSION
    if protocol is not None:
        created["protocol"] = protocol
    journal.unlink()
    rewritten = Journal(journal)
    for event in events:
        rewritten.append(event)
    rewritten.close()
    path = journal.parent / "snapshots" / snapshot_name(0)
    with closing(Snapshot(path)) as found:
        record, extent = RunRecord.of(found), found._extents[RECORD]
        begin = found._begin + extent.at(0)
        end = begin + extent.numel
    assert record is not None and record.follows(before)
    lines = before[: record.journal_bytes].count(b"\n")
    known = b"".join(journal.read_bytes().splitlines(keepends=True)[:lines])
    told = replace(record, journal_bytes=len(known), journal_crc=zlib.crc32(known)).to_bytes().ljust(end - begin)
    content = path.read_bytes()
    # Its checksum is in the file's head, which had none of its own.
    sums = (f"{crc32(memoryview(each)):08x}".encode() for each in (content[begin:end], told))
    head = content[:begin].replace(*sums).replace(b'"head_crc32"', b'"some_other"', 1)
    path.write_bytes(head + told + content[end:])


@pytest.mark.parametrize(("protocol", "said"), [(None, "an earlier one"), (2, "2"), (PROTOCOL_VERSION + 1, "7")])
def test_a_run_of_a_release_with_other_digests_is_refused(make_service: MakeService, protocol: int | None, said: str):
    service = begun_and_stopped(make_service, 1)
    rewrite_protocol(service, protocol)
    assert service.start().wait() == 2
    assert f"speak another protocol than 3 ({said})" in service.output
    assert "start a new run under another name" in service.output


def test_a_run_of_the_release_before_is_served(make_service: MakeService):
    service = begun_and_stopped(make_service, 1)
    rewrite_protocol(service, 3)
    service.start()
    digest = service.events("committed")[0]["digest"]
    with service.client("p0", START) as client:
        assert client.resume(0, digest) is None
        assert client.sync(START).number == 1


def test_another_number_of_peers_is_refused_for_a_run_that_has_begun(make_service: MakeService):
    service = begun_and_stopped(make_service, 2)
    service.runs["demo"]["peers"] = 3
    assert service.start().wait() == 2
    assert "peers is 3, but the run was started with 2" in service.output
