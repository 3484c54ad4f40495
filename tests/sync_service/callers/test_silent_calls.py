# SPDX-License-Identifier: Apache-2.0
"""Calls that say nothing, and peers that ask for too much, are in nobody's way."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.protocol.frames import Frame, whole_box
from megatron_ext.sync_service.protocol.protocol import MAX_MESSAGE, pb2
from megatron_ext.sync_service.protocol.wire import METHODS, Upload, pack
from megatron_ext.sync_service.server.grpc_health import HEALTH_METHODS
from tests.support.every_run import one_of_each
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import start_values

MakeService = Callable[..., Service]
START = start_values(1)
TOKEN = "0123456789-0123456789"
OF_PEERS = [method.name for method in pb2.DESCRIPTOR.services_by_name["SyncService"].methods]
ALL = [METHODS + name for name in OF_PEERS] + [HEALTH_METHODS + name for name in ("Check", "Watch")]
# A call with one message and one with a stream of them from peers, one from people, and one of the health service.
OF_EACH_KIND = ("/Register", "/Upload", "/Status", "/Watch")
ONE_OF_EACH_KIND = [number for number, name in enumerate(ALL) if name.endswith(OF_EACH_KIND)]


class Calls:
    """Calls whose messages are whatever a test wants, by the hundred: they take no threads on this side either."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._channel = self.run(self._open(address))
        self.calls: list[Any] = []

    def begin(self, method: str, *messages: bytes) -> Any:
        """Begin a call and send messages, without an end; the call has no thread."""

        async def begin() -> Any:
            call = self._channel.stream_stream(method)(metadata=self._metadata)
            for message in messages:
                await call.write(message)
            with suppress(grpc.aio.AioRpcError):  # it has ended already
                await call.wait_for_connection()
            return call

        self.calls.append(self.run(begin()))
        return self.calls[-1]

    def end_of(self, call: Any) -> tuple[grpc.StatusCode, str]:
        """Return how a call ends."""

        async def end() -> tuple[grpc.StatusCode, str]:
            with suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            return await call.code(), await call.details()

        return self.run(end())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        """End all calls."""
        self.run(self._channel.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open(self, address: str) -> Any:
        return grpc.aio.insecure_channel(address, [("grpc.max_send_message_length", -1)])


@contextmanager
def calls_to(service: Service, token: str | None = None) -> Iterator[Calls]:
    calls = Calls(service.address, token)
    try:
        yield calls
    finally:
        calls.close()


def memory_and_threads(service: Service) -> tuple[int, int]:
    """Return the MiB that the server has had at most, and its threads."""
    assert service.server is not None
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{service.server.pid}/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) >> 10, int(lines["Threads"])


def assert_prompt(work: Callable[[], object]) -> None:
    """Check each of five tries: usually within a second, as is promised, and never far beyond on a busy machine."""
    found = []
    for _ in range(5):
        begin = time.monotonic()
        work()
        found.append(time.monotonic() - begin)
    assert median(found) < 1.0 and max(found) < 10.0, found


def health_of(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)


@pytest.mark.parametrize("method", one_of_each(ALL, ONE_OF_EACH_KIND), ids=lambda name: name.rpartition("/")[2])
def test_a_thousand_silent_calls_keep_neither_people_nor_peers_waiting(
    make_service: MakeService, tmp_path: Path, method: str
):
    (tmp_path / "token").write_text(TOKEN)
    service = make_service(peers=1)
    service.extra = {"token_file": str(tmp_path / "token"), "silent_seconds": 600.0}
    service.start()
    connection = {"token_file": str(tmp_path / "token")}
    people = Connection(ConnectionConfig(server=service.address, call_seconds=20.0, **connection))
    with (
        calls_to(service, TOKEN if method.startswith(METHODS) else None) as calls,
        service.client("p0", START, connection=connection) as client,
    ):
        client.start(START)
        for _ in range(1000):
            calls.begin(method)
        assert_prompt(lambda: people.call("Status", pb2.StatusRequest()))
        assert_prompt(lambda: health_of(service.address))
        assert_prompt(lambda: client.sync(START))
    people.close()


def test_who_shows_no_token_holds_nothing(make_service: MakeService, tmp_path: Path):
    (tmp_path / "token").write_text(TOKEN)
    service = make_service()
    service.extra = {"token_file": str(tmp_path / "token"), "silent_seconds": 600.0}
    service.start()
    with calls_to(service) as calls:
        for name in OF_PEERS:
            code, text = calls.end_of(calls.begin(METHODS + name))
            assert code == grpc.StatusCode.UNAUTHENTICATED and "the token is missing or wrong" in text


def test_a_silent_call_ends_after_some_seconds_and_a_newer_one_takes_the_place_of_the_longest_silent(
    make_service: MakeService,
):
    service = make_service()
    service.extra = {"silent_seconds": 1.0}
    service.start()
    with calls_to(service) as calls:
        code, text = calls.end_of(calls.begin(METHODS + "Status"))
        assert code == grpc.StatusCode.UNAVAILABLE and "no message, and it was silent for 1 s" in text
    service.server.kill()
    service.server.wait()
    service.extra = {"silent_calls": 8, "silent_seconds": 600.0}
    service.start()
    with calls_to(service) as calls:
        begun = [calls.begin(METHODS + name) for name in ("Status", "Upload", "Await")]
        code, text = calls.end_of(begun[0])
        assert code == grpc.StatusCode.UNAVAILABLE and "newer calls have taken its place" in text
        assert not begun[1].done() and not begun[2].done()


def uploads_of(client: Any, size: int) -> tuple[bytes, bytes]:
    """Return the first message of an upload, and one of about as many bytes whose frame is refused at last."""
    first = Upload(caller=client._membership.caller, round=client.round + 1, frames=())
    shape = (size // 16,)
    frame = Frame.make("unknown", shape, whole_box(shape), 0, torch.ones(shape), "fp32")
    return pack(first), pack(Upload(caller=client._membership.caller, round=client.round + 1, frames=[frame] * 4))


def test_more_streams_than_a_peer_may_have_are_refused_by_name_and_others_keep_theirs(make_service: MakeService):
    service = make_service()
    service.extra = {"peer_streams": 3}
    service.start()
    with calls_to(service) as calls, service.client("p0", START) as p0, service.client("p1", START) as p1:
        pool = ThreadPoolExecutor(1)
        started = pool.submit(p0.start, START)
        p1.start(START)
        started.result()
        first, _ = uploads_of(p0, 64)
        begun = [calls.begin(METHODS + "Upload", first) for _ in range(4)]

        def ended() -> tuple[grpc.StatusCode, str] | None:
            done = [call for call in begun if call.done()]
            for call in done:
                begun.remove(call)
                code, text = calls.end_of(call)
                if code != grpc.StatusCode.UNAVAILABLE:
                    return code, text
                # Of three calls the server has not read yet who makes them, so that it asks for another try.
                begun.append(calls.begin(METHODS + "Upload", first))
            return None

        code, text = until(ended, "the refusal")
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "peer 'p0' has 3 streams open, as many as peer_streams of the server allows" in text
        with pytest.raises(UserError, match="peer_streams"):
            p0.upload(1, START)
        p1.upload(1, START)
        pool.shutdown()


def test_a_peers_messages_that_are_in_flight_take_no_more_memory_than_it_may_have(make_service: MakeService):
    service = make_service(peers=1)
    service.extra = {"peer_bytes_in_flight": 4 * MAX_MESSAGE, "stream_window": 1 << 20}
    service.start()
    with calls_to(service) as calls, service.client("p0", START) as client:
        client.start(START)
        before, _ = memory_and_threads(service)
        first, large = uploads_of(client, 15 << 20)
        begun = [calls.begin(METHODS + "Upload", first) for _ in range(64)]

        async def flood() -> None:
            await asyncio.gather(*(call.write(large) for call in begun), return_exceptions=True)

        calls.run(flood())
        for call in begun:
            assert "unknown" in calls.end_of(call)[1]
        after, _ = memory_and_threads(service)
        # 64 messages of 15 MiB are 960, and took 1,546 without the limit. 4 may be there at a time, and as much again
        # in the works; what the allocator keeps of freed messages depends on how busy the machine is (237 to 261 seen).
        assert after - before < 2 * 4 * 16 + 256


def test_an_upload_whose_first_message_brings_values_is_refused_by_name(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with calls_to(service) as calls, service.client("p0", START) as client:
        client.start(START)
        _, large = uploads_of(client, 1 << 20)
        code, text = calls.end_of(calls.begin(METHODS + "Upload", large))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "install the release of the server at the peer" in text


def test_the_servers_threads_do_not_grow_with_calls_nor_rounds(make_service: MakeService):
    service = make_service()
    service.start()
    await_start = pb2.AwaitRequest(caller=pb2.Caller(run="demo", peer="nobody", instance="x"), round=1, seconds=20.0)
    with calls_to(service) as calls:
        peers = [service.peer(f"p{number}", 30) for number in range(2)]
        for peer in peers:
            assert peer.wait() == 0
        begun = [calls.begin(METHODS + "Await", await_start.SerializeToString()) for _ in range(200)]
        begun += [calls.begin(METHODS + "Status", pb2.StatusRequest().SerializeToString()) for _ in range(200)]
        for call in begun:
            calls.end_of(call)
    # 12 of the process and gRPC, and pools of 2 + 32 + 8, which are filled as needed.
    assert memory_and_threads(service)[1] < 70
