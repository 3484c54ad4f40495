# SPDX-License-Identifier: Apache-2.0
"""What one caller may hold of the server's threads, slices and places to wait: others always get theirs."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2

from megatron_ext.errors import UserError
from megatron_ext.sync_service.callers.call_limits import Places
from megatron_ext.sync_service.callers.threads import Threads
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.wire import METHODS
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.server.config import ServerConfig
from megatron_ext.sync_service.server.grpc_health import HEALTH_METHODS, HealthService
from tests.support.waiting import until
from tests.sync_service.callers.test_silent_calls import Calls, calls_to
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import start_values

MakeService = Callable[..., Service]
START = start_values(1)
LARGE = {"large": torch.zeros(8 << 20), "small": torch.ones(4)}
FRAMES = {"frame_bytes": 1 << 20, "call_bytes": 4 << 20}
HASHED = hashlib.sha256(bytes(32 << 20)).digest()


@contextmanager
def two_peers(service: Service, values: dict[str, torch.Tensor], **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the clients of two peers that have started."""
    service.start()
    with (
        service.client("p0", values, **options) as p0,
        service.client("p1", values, **options) as p1,
        ThreadPoolExecutor(1) as pool,
    ):
        started = pool.submit(p0.start, values)
        p1.start(values)
        started.result()
        yield p0, p1


def download(client: Any, *slices: Any) -> bytes:
    """Return the request of a download of the newest values."""
    request = pb2.DownloadRequest(caller=client._membership.caller, round=client.round, slices=slices)
    return bytes(request.SerializeToString())


def compared(count: int) -> list[Any]:
    """Return slices that the server compares with what is expected, of 32 MiB each."""
    return [pb2.Slice(name="large", expected=HASHED)] * count


def awaited(client: Any, seconds: float = 20.0) -> bytes:
    """Return the request of a call that awaits the open round."""
    caller = client._membership.caller
    return bytes(pb2.AwaitRequest(caller=caller, round=client.round + 1, seconds=seconds).SerializeToString())


def messages_of(calls: Calls, call: Any) -> list[Any]:
    """Return all messages of a download."""

    async def read() -> list[Any]:
        found = []
        while (message := await call.read()) is not grpc.aio.EOF:
            found.append(pb2.FrameBatch.FromString(message))
        return found

    return list(calls.run(read()))


def test_a_peer_that_lets_the_server_compare_much_keeps_no_other_peer_waiting(make_service: MakeService):
    service = make_service()
    with two_peers(service, LARGE, **FRAMES) as (p0, p1), calls_to(service) as calls:
        for _ in range(16):  # 64 GiB to compare
            calls.begin(METHODS + "Download", download(p0, *compared(128)))
        begin = time.monotonic()
        (batch,) = messages_of(calls, calls.begin(METHODS + "Download", download(p1, pb2.Slice(name="small"))))
        assert time.monotonic() - begin < 20.0  # which takes far longer where it waits for the others
        assert [frame.name for frame in batch.frames] == ["small"]


def test_a_download_in_which_nothing_has_changed_gives_its_thread_away_after_some_bytes(make_service: MakeService):
    service = make_service()
    with two_peers(service, LARGE, **FRAMES) as (p0, _), calls_to(service) as calls:
        batches = messages_of(calls, calls.begin(METHODS + "Download", download(p0, *compared(4))))
        assert [place for batch in batches for place in batch.unchanged] == [0, 1, 2, 3]
        assert len(batches) >= 128 // 16


def test_the_first_step_of_a_download_counts_as_one_of_the_peers_streams(make_service: MakeService):
    service = make_service()
    service.extra = {"peer_streams": 2}
    with two_peers(service, LARGE, streams=1, **FRAMES) as (p0, _), calls_to(service) as calls:
        request = download(p0, *compared(128))
        begun = [calls.begin(METHODS + "Download", request) for _ in range(3)]

        def is_refused() -> bool:
            for index, call in enumerate(begun):
                if call.done():
                    text = calls.end_of(call)[1]
                    if "2 streams open, as many as peer_streams of the server allows" in text:
                        return True
                    # The others have not been asked yet who they are, which may take a moment.
                    assert "say who they are" in text and text.endswith("try again")
                    begun[index] = calls.begin(METHODS + "Download", request)
            return False

        until(is_refused, "the refusal", 20.0)


def test_more_slices_than_a_peer_may_ask_for_are_refused_by_name(make_service: MakeService):
    service = make_service()
    service.extra = {"peer_slices": 5}
    with two_peers(service, START) as (p0, p1), calls_to(service) as calls:
        scale = pb2.Slice(name="scale")
        assert len(messages_of(calls, calls.begin(METHODS + "Download", download(p0, *[scale] * 5)))[0].frames) == 5
        code, text = calls.end_of(calls.begin(METHODS + "Download", download(p0, *[scale] * 6)))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "peer 'p0' asks for more slices" in text and "than peer_slices of the server allows, 5" in text
        assert len(messages_of(calls, calls.begin(METHODS + "Download", download(p1, scale)))) == 1


def test_who_is_not_a_member_takes_nothing_of_the_peer_whose_name_it_uses(make_service: MakeService):
    service = make_service()
    service.extra = {"peer_waiting_calls": 1, "peer_streams": 16}
    with two_peers(service, START) as (p0, p1), calls_to(service) as calls:
        for method in ("Await", "Download", "Upload"):
            stranger = pb2.Caller(run="demo", peer="p0", instance="guessed")
            kind = {"Await": pb2.AwaitRequest, "Download": pb2.DownloadRequest, "Upload": pb2.UploadRequest}[method]
            request = kind(caller=stranger, round=p0.round).SerializeToString()
            for call in [calls.begin(METHODS + method, request) for _ in range(16)]:
                assert "another process has registered as peer 'p0'" in calls.end_of(call)[1]
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(p0.sync, START)
            assert p1.sync(START).number == done.result().number == 1


def test_more_calls_of_a_peer_than_may_wait_for_a_round_are_refused_by_name_and_others_wait_on(
    make_service: MakeService,
):
    service = make_service()
    service.extra = {"peer_waiting_calls": 3}
    with two_peers(service, START) as (p0, p1), calls_to(service) as calls:
        begun = [calls.begin(METHODS + "Await", awaited(p0)) for _ in range(4)]
        until(lambda: any(call.done() for call in begun), "the refusal", 10.0)
        (ended,) = [call for call in begun if call.done()]
        code, text = calls.end_of(ended)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "3 calls wait for a round of peer 'p0'" in text and "peer_waiting_calls of the server" in text
        other = calls.begin(METHODS + "Await", awaited(p1))
        time.sleep(0.5)
        assert not other.done()


def registration(client: Any, peer: str, instance: str) -> bytes:
    """Return the request of a process that wants a peer's place, as the peer itself has registered."""
    specs = [pb2.TensorSpec(name=spec.name, shape=spec.shape, unit=spec.unit) for spec in client.catalog]
    request = pb2.RegisterRequest(
        caller=pb2.Caller(run="demo", peer=peer, instance=instance),
        protocol=PROTOCOL_VERSION,
        config={"codec": "fp32"},
        catalog=specs,
        asynchronous=True,
        sharded=True,
    )
    return bytes(request.SerializeToString())


def test_more_calls_than_may_wait_for_a_peers_place_are_refused_by_name_and_the_peer_trains_on(
    make_service: MakeService,
):
    service = make_service(peers=1)
    service.extra = {"peer_waiting_calls": 2}
    service.start()
    with service.client("p0", START, heartbeat_seconds=20.0) as p0, calls_to(service) as calls:
        p0.start(START)
        begun = [calls.begin(METHODS + "Register", registration(p0, "p0", f"i{number}")) for number in range(3)]
        until(lambda: any(call.done() for call in begun), "the refusal", 10.0)
        (ended,) = [call for call in begun if call.done()]
        code, text = calls.end_of(ended)
        assert code == grpc.StatusCode.UNAVAILABLE and "peer_waiting_calls of the server" in text
        assert p0.sync(START).number == 1


@pytest.mark.parametrize("deadline", [0.8, 3.0])
def test_a_call_that_waits_is_answered_before_its_deadline(make_service: MakeService, deadline: float):
    service = make_service(peers=2)
    service.start()
    with service.client("p0", START, heartbeat_seconds=20.0) as p0:
        p0.register()
        with grpc.insecure_channel(service.address) as channel:
            reply = channel.unary_unary(METHODS + "Await")(awaited(p0), timeout=deadline)
            assert pb2.AwaitReply.FromString(reply).state in (pb2.AwaitReply.WAITING, pb2.AwaitReply.PUBLISH)
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(METHODS + "Register")(registration(p0, "p0", "another"), timeout=deadline)
    # It may have been killed, which that time does not tell.
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "peer 'p0' is alive in another process" in caught.value.details()


def test_a_place_whose_process_was_killed_is_free_in_spite_of_short_deadlines(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    with service.client("p0", START, heartbeat_seconds=2.0) as p0:
        p0.start(START)
        p0._membership._heartbeat._stopped.set()  # as by a kill, it says nothing more
        p0._membership._heartbeat = None
        with service.client("p0", START, connection={"call_seconds": 2.0}) as follower:
            follower.start(START)
            assert follower.sync(START).number == 1


def test_watchers_of_the_health_leave_places_to_those_of_other_addresses(make_service: MakeService):
    service = make_service()
    service.start()
    with calls_to(service) as calls:
        request = health_pb2.HealthCheckRequest().SerializeToString()
        begun = [calls.begin(HEALTH_METHODS + "Watch", request) for _ in range(17)]
        until(lambda: any(call.done() for call in begun), "the refusal", 10.0)
        (ended,) = [call for call in begun if call.done()]
        code, text = calls.end_of(ended)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "health_watches of the server allows, 64, and 16 of an address; ask with Check" in text

    async def others() -> None:
        health = HealthService(["demo"], 8)
        watches = [health.watch(health_pb2.HealthCheckRequest(), address) for address in "aaabbcc"]
        replies = await asyncio.gather(*(anext(watch) for watch in watches), return_exceptions=True)
        assert [isinstance(reply, Refusal) for reply in replies] == [False, False, True, False, False, False, False]
        for watch in watches:
            await watch.aclose()

    asyncio.run(others())


def test_places_are_given_back_and_counted_by_caller_and_altogether():
    places, full = Places(2, 3), Refusal("full", "no more")
    with ExitStack() as held:
        held.enter_context(places.taken("a", full, 2))
        with pytest.raises(Refusal, match="no more"), places.taken("a", full):
            pass
        held.enter_context(places.taken("b", full))
        with pytest.raises(Refusal, match="no more"), places.taken("b", full):
            pass
    assert places.of("a") == places.of("b") == 0


def test_a_caller_has_half_of_the_threads_at_most_also_with_calls_that_were_cancelled():
    async def work() -> None:
        threads, gate, begun = Threads(4, "test"), threading.Event(), []

        def wait(name: str) -> str:
            begun.append(name)
            gate.wait(20.0)
            return name

        hostile = [asyncio.create_task(threads.run("a", lambda: wait("a"))) for _ in range(8)]
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        for task in hostile[:6]:
            task.cancel()
        await asyncio.gather(*hostile[:6], return_exceptions=True)
        assert await asyncio.wait_for(threads.run("b", lambda: "b"), 10.0) == "b"
        assert begun == ["a", "a"]  # which cannot be interrupted, and hold the share
        gate.set()
        assert await asyncio.gather(*hostile[6:]) == ["a", "a"]
        assert len(begun) == 4  # those that were cancelled before they began never do
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda: 1 // 0)
        threads.close()

    asyncio.run(work())


def test_a_job_in_a_thread_wakes_the_event_loop_once_and_its_error_reaches_who_waits(monkeypatch: pytest.MonkeyPatch):
    """Each waking writes to a socket, and there are two jobs for every mebibyte of values."""

    def fail() -> None:
        raise Refusal("state", "not now")

    async def work() -> int:
        threads, woken = Threads(2, "test"), []
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: woken.append(args) or wake(*args))
        for number in range(5):
            assert await threads.run("caller", lambda number=number: number) == number
        with pytest.raises(Refusal, match="not now"):
            await threads.run("caller", fail)
        threads.close()
        return len(woken)

    assert asyncio.run(work()) == 6


@pytest.mark.parametrize(
    ("name", "least"),
    [("peer_slices", 1), ("peer_waiting_calls", 1), ("health_watches", 4), ("silent_calls", 4), ("connections", 16)],
)
def test_a_limit_that_lets_nobody_in_is_refused_in_the_configuration(name: str, least: int):
    config = {"dir": "x", "runs": {"r": RunConfig(peers=1)}}
    ServerConfig(**config, **{name: least}).check()
    with pytest.raises(UserError, match=f"{name} is {least - 1}; it must be {least} or more"):
        ServerConfig(**config, **{name: least - 1}).check()
