# SPDX-License-Identifier: Apache-2.0
"""From gRPC's calls to the servicers' methods: who may call, what waits where, and what is refused as which status.

The calls live in an event loop, where one that waits, for a message, for a round, or for its turn, holds no thread. The
methods themselves run in threads, of which there are few: some for what people ask, some for what peers ask, and some
for values.

Messages travel through gRPC as bytes. They are read and written in those threads, so that the loop copies no values.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_ext.sync_service.call_limits import PeerLimits, SilentCalls
from megatron_ext.sync_service.config import ServerConfig
from megatron_ext.sync_service.grpc_health import HEALTH_METHODS, HealthService
from megatron_ext.sync_service.origin import Origin
from megatron_ext.sync_service.protocol import MAX_MESSAGE, DecodeError, grpc, health_pb2, pb2
from megatron_ext.sync_service.refusal import NameInUse, Refusal
from megatron_ext.sync_service.remote_shard import ShardProblem
from megatron_ext.sync_service.security import TokenCheck
from megatron_ext.sync_service.values_servicer import FRAME_BYTES, ValuesServicer
from megatron_ext.sync_service.wire import METHODS

__all__ = ["Calls"]

log = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 20.0
"""How long `Await` takes at most, so that a peer learns within it that the server has gone."""

_STRANGERS, _STRANGERS_OF_AN_ADDRESS = 32, 8
"""Silent calls of the health service, which needs no token."""

_SMALL_BYTES, _LARGE_REQUESTS = 64 << 10, 8
"""Requests that have more bytes, such as a large model's catalog, are answered a few at a time."""

_PEOPLE = ("Status", "Evict", "Drain")
"""Methods that are answered even when all peers' threads are busy."""

_UNARY = ("Commit", "Heartbeat", "Leave", "Shard", *_PEOPLE)

_STATUS = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "state": grpc.StatusCode.FAILED_PRECONDITION,
    "denied": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "damaged": grpc.StatusCode.DATA_LOSS,
    "later": grpc.StatusCode.UNAVAILABLE,
    "full": grpc.StatusCode.FAILED_PRECONDITION,
}


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call."""

    context: Any
    """gRPC's."""

    origin: Origin
    """Who has made it."""

    async def read(self) -> bytes | None:
        """Return the next message, None at the end."""
        message = await self.context.read()
        return None if message is grpc.aio.EOF else message

    async def write(self, message: Any) -> None:
        """Send a message of protobuf."""
        await self.context.write(message.SerializeToString())


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """Serves all methods. For one event loop."""

    def __init__(
        self, servicer: ValuesServicer, health: HealthService, config: ServerConfig, token: TokenCheck
    ) -> None:
        """Take what answers, and who may ask."""
        self._servicer: Any = servicer
        self._health = health
        self._token = token
        self._seconds = config.silent_seconds
        self._large = 0
        self._silent = SilentCalls(config.silent_calls // 4, config.silent_calls)
        self._strangers = SilentCalls(_STRANGERS_OF_AN_ADDRESS, _STRANGERS)
        messages = config.peer_bytes_in_flight
        self._uploads = PeerLimits(config.peer_streams, messages // MAX_MESSAGE)
        self._downloads = PeerLimits(config.peer_streams, messages // (2 * FRAME_BYTES))
        self._for_people = ThreadPoolExecutor(2, "people")
        self._for_peers = ThreadPoolExecutor(16, "peers")
        # These wait for other servers, if there are any.
        self._for_commits = ThreadPoolExecutor(32, "commits")
        self._for_heartbeats = ThreadPoolExecutor(2, "heartbeats")
        self._for_values = ThreadPoolExecutor(max(8, 2 * (os.cpu_count() or 1)), "values")
        methods: dict[str, Callable[[_Call, bytes], Awaitable[None]]] = {
            METHODS + "Register": self._register,
            METHODS + "Upload": self._upload,
            METHODS + "Download": self._download,
            METHODS + "Await": self._await,
            HEALTH_METHODS + "Check": self._check,
            HEALTH_METHODS + "Watch": self._watch,
            **{METHODS + name: self._unary(name) for name in _UNARY},
        }
        self._handlers = {name: self._handler(name, work) for name, work in methods.items()}

    def service(self, details: Any) -> Any:
        """Return what handles a call, None if there is no such method."""
        return self._handlers.get(details.method)

    def close(self) -> None:
        """Let the threads end."""
        pools = self._for_people, self._for_peers, self._for_commits, self._for_heartbeats, self._for_values
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)

    # -----------------------------------------------------------------------------------------------------------
    # Every call
    # -----------------------------------------------------------------------------------------------------------

    def _handler(self, name: str, work: Callable[[_Call, bytes], Awaitable[None]]) -> Any:
        """Return gRPC's handler of a method, which may have any number of messages in both directions."""
        is_open = name.startswith(HEALTH_METHODS)
        silent = self._strangers if is_open else self._silent

        async def handle(_messages: Any, context: Any) -> None:
            if not is_open and not self._token.is_shown(context.invocation_metadata()):
                await context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong; give the server's token_file"
                )
            call = _Call(context=context, origin=Origin.of_call(context))
            ended = None
            try:
                await work(call, await self._first(call, silent))
            except Exception as error:  # whatever it is, the caller is told, and the log where it is a fault of ours
                ended = _status_of(error, name)
                # What was under way holds messages, and is forgotten now, not when Python next looks for cycles.
                error.__traceback__ = None
            if ended is not None:
                await context.abort(*ended)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _first(self, call: _Call, silent: SilentCalls) -> bytes:
        """Return the first message of a call.

        Raises:
            Refusal: none has come.
        """
        reading = asyncio.ensure_future(call.read())
        reading.add_done_callback(_look_at)
        with silent.waiting(call.origin.address) as ended:
            # The reading ends with the call.
            await asyncio.wait((reading, ended), timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            why = "newer calls have taken its place" if ended.done() else f"it was silent for {self._seconds:g} s"
            raise Refusal("later", f"the call has brought no message, and {why}")
        message = reading.result()
        if message is None:
            raise Refusal("invalid", "a call without a message")
        return message

    # -----------------------------------------------------------------------------------------------------------
    # The methods
    # -----------------------------------------------------------------------------------------------------------

    def _unary(self, name: str) -> Callable[[_Call, bytes], Awaitable[None]]:
        """Return what answers a method of one message in each direction."""
        method, request_type = getattr(self._servicer, name), getattr(pb2, f"{name}Request")
        pools = {"Commit": self._for_commits, "Heartbeat": self._for_heartbeats}
        pool = self._for_people if name in _PEOPLE else pools.get(name, self._for_peers)

        async def answer(call: _Call, message: bytes) -> None:
            with self._place_for(message):
                await call.write(await _in(pool, lambda: method(request_type.FromString(message), call.origin)))

        return answer

    @contextmanager
    def _place_for(self, message: bytes) -> Iterator[None]:
        """Count a message that takes much memory as long as it is worked on.

        Raises:
            Refusal: there are too many.
        """
        if len(message) <= _SMALL_BYTES:
            yield
            return
        if self._large >= _LARGE_REQUESTS:
            raise Refusal("later", f"{_LARGE_REQUESTS} large requests are being answered; try again")
        self._large += 1
        try:
            yield
        finally:
            self._large -= 1

    async def _register(self, call: _Call, message: bytes) -> None:
        def register() -> Any:
            return self._servicer.Register(pb2.RegisterRequest.FromString(message), call.origin)

        try:
            with self._place_for(message):
                reply = await _in(self._for_peers, register)
        except NameInUse as in_use:
            # The other process may have been killed: then it says nothing until its time is over.
            await asyncio.sleep(in_use.seconds + 0.05)
            with self._place_for(message):
                reply = await _in(self._for_peers, register)
        await call.write(reply)

    async def _await(self, call: _Call, message: bytes) -> None:
        if len(message) > _SMALL_BYTES:
            raise Refusal("invalid", f"a call that awaits a round has {len(message)} bytes; {_SMALL_BYTES} are enough")
        request = pb2.AwaitRequest.FromString(message)
        loop = asyncio.get_running_loop()
        end = loop.time() + (min(request.seconds, MAX_WAIT_SECONDS) if request.seconds > 0 else 0.0)  # of NaN, too
        with self._servicer.awaited(request).watched() as changed:
            while True:
                changed.clear()
                reply = await _in(self._for_peers, self._servicer.Await, request, call.origin)
                left = end - loop.time()
                if reply.state != pb2.AwaitReply.WAITING or left <= 0:
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)
        await call.write(reply)

    async def _upload(self, call: _Call, message: bytes) -> None:
        if len(message) > _SMALL_BYTES:
            raise Refusal(
                "invalid",
                f"an upload's first message has {len(message)} bytes, and says but who calls; install the release of "
                "the server at the peer",
            )
        upload = await _in(self._for_values, self._servicer.Upload, message)
        await upload.hear()
        is_over = await _in(self._for_values, upload.take_first)
        with self._uploads.stream(upload.peer, f"peer {upload.peer[1]!r}"):
            while not is_over:
                async with self._uploads.message(upload.peer):
                    further = await call.read()
                    is_over = further is None or await _in(self._for_values, upload.take, further)
        await call.write(upload.reply)

    async def _download(self, call: _Call, message: bytes) -> None:
        def download_of() -> Any:
            return self._servicer.Download(pb2.DownloadRequest.FromString(message))

        with self._place_for(message):
            download = await _in(self._for_values, download_of)
        try:
            await download.hear()
            packed = await _in(self._for_values, download.next)
            with self._downloads.stream(download.peer, f"peer {download.peer[1]!r}"):
                while packed is not None:
                    async with self._downloads.message(download.peer):
                        await call.context.write(packed)
                        packed = await _in(self._for_values, download.next)
        finally:
            # Once the step that was under way is over, should the call have been cancelled in it.
            self._for_values.submit(download.close)

    async def _check(self, call: _Call, message: bytes) -> None:
        await call.write(self._health.check(_asked(message)))

    async def _watch(self, call: _Call, message: bytes) -> None:
        async with aclosing(self._health.watch(_asked(message))) as replies:
            async for reply in replies:
                await call.write(reply)


def _asked(message: bytes) -> Any:
    """Return what somebody asks of the health, who may be anybody.

    Raises:
        Refusal: it is more than a name.
    """
    if len(message) > _SMALL_BYTES:
        raise Refusal("invalid", f"a question after the health has {len(message)} bytes, and asks but for a name")
    return health_pb2.HealthCheckRequest.FromString(message)


async def _in[**P, T](
    pool: ThreadPoolExecutor, work: Callable[P, T], *arguments: P.args, **_options: P.kwargs
) -> T:
    """Return what a function returns in a thread of a pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *arguments))


def _look_at(reading: asyncio.Future[Any]) -> None:
    """Let nobody complain that nobody has looked at how a reading ended whose call is over."""
    if not reading.cancelled():
        reading.exception()


def _status_of(error: Exception, method: str) -> tuple[Any, str]:
    """Return the status and its text that say what has ended a call."""
    if isinstance(error, Refusal):
        return _STATUS[error.reason], str(error)
    if isinstance(error, ShardProblem):
        return _STATUS["state" if error.is_refusal else "later"], str(error)
    if isinstance(error, DecodeError):
        return _STATUS["invalid"], f"a message of {method} cannot be read: {error}"
    if isinstance(error, OSError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, f"the server cannot write: {error}"
    log.error("%s has failed", method, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"the server has failed in {method} ({type(error).__name__}); its log says more"
