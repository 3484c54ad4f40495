# SPDX-License-Identifier: Apache-2.0
"""From gRPC's calls to the servicers' methods: who may call, what waits where, and what is refused as which status.

The calls live in an event loop, where one that waits, for a message, for a round, or for its turn, holds no thread. The
methods themselves run in threads, of which there are few: some for what people ask, some for what peers ask, and some
for values. Of each kind a caller has half at most.

Messages travel through gRPC as bytes. They are read and written in those threads, so that the loop copies no values.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_ext.sync_service.callers.call_limits import Caller, PeerLimits, Places, SilentCalls
from megatron_ext.sync_service.callers.connections import Connections
from megatron_ext.sync_service.callers.origin import Origin
from megatron_ext.sync_service.callers.threads import Threads
from megatron_ext.sync_service.channel.security import TokenCheck
from megatron_ext.sync_service.disk.durable import described
from megatron_ext.sync_service.protocol.protocol import MAX_MESSAGE, DecodeError, grpc, health_pb2, pb2
from megatron_ext.sync_service.protocol.refusal import NameInUse, Reason, Refusal
from megatron_ext.sync_service.protocol.wire import METHODS
from megatron_ext.sync_service.server.config import ServerConfig
from megatron_ext.sync_service.server.grpc_health import HEALTH_METHODS, HealthService
from megatron_ext.sync_service.server.values_servicer import FRAME_BYTES, ValuesServicer
from megatron_ext.sync_service.shards.remote_shard import ShardProblem

__all__ = ["Calls"]

log = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 20.0
"""How long `Await` and `Resume` take at most, so that a peer learns within it that the server has gone."""

_STRANGERS, _STRANGERS_OF_AN_ADDRESS = 32, 8
"""Silent calls of the health service, which needs no token."""

_SMALL_BYTES, _LARGE_REQUESTS, _LARGE_OF_AN_ADDRESS = 64 << 10, 16, 8
"""Requests that have more bytes, such as a large model's catalog, are answered a few at a time."""

_ANSWER_SECONDS = 1.0
"""How long before its deadline a call that waits is answered."""

_PEOPLE = ("Status", "Evict", "Drain")
"""Methods that are answered even when all peers' threads are busy."""

_WAITING = ("Await", "Resume")
"""Methods that are answered when something else than to wait can be said, or after a while."""

_OF_PEERS = ("Commit", "Heartbeat", "Leave")
"""Methods whose requests say who calls, and of which one message in each direction is all."""

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

    @property
    def seconds_to_wait(self) -> float:
        """How long it may wait to be answered before its deadline."""
        left = self.context.time_remaining()
        return math.inf if left is None else max(left - _ANSWER_SECONDS, left / 2)

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
        self,
        servicer: ValuesServicer,
        health: HealthService,
        config: ServerConfig,
        token: TokenCheck,
        connections: Connections,
    ) -> None:
        """Take what answers, who may ask, and what is told who has shown the token."""
        self._servicer: Any = servicer
        self._health = health
        self._token = token
        self._connections = connections
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._seconds = config.silent_seconds
        self._large = Places(_LARGE_OF_AN_ADDRESS, _LARGE_REQUESTS)
        self._silent = SilentCalls(config.silent_calls // 4, config.silent_calls)
        self._strangers = SilentCalls(_STRANGERS_OF_AN_ADDRESS, _STRANGERS)
        messages = config.peer_bytes_in_flight
        self._uploads = PeerLimits(config.peer_streams, messages // MAX_MESSAGE)
        self._downloads = PeerLimits(config.peer_streams, messages // (2 * FRAME_BYTES))
        self._unknown = Places(config.peer_streams)
        self._slices = Places(config.peer_slices)
        self._awaits, self._registers = Places(config.peer_waiting_calls), Places(config.peer_waiting_calls)
        self._for_people = Threads(2, "people")
        self._for_peers = Threads(16, "peers")
        # These wait for other servers, if there are any, or are what others wait for.
        self._for_servers = Threads(32, "servers")
        self._for_heartbeats = Threads(2, "heartbeats")
        self._for_values = Threads(max(8, 2 * (os.cpu_count() or 1)), "values")
        methods: dict[str, Callable[[_Call, bytes], Awaitable[None]]] = {
            METHODS + "Register": self._register,
            METHODS + "Upload": self._upload,
            METHODS + "Download": self._download,
            **{METHODS + name: self._waiting(name) for name in _WAITING},
            METHODS + "Shard": self._shard,
            HEALTH_METHODS + "Check": self._check,
            HEALTH_METHODS + "Watch": self._watch,
            **{METHODS + name: self._unary(name) for name in (*_OF_PEERS, *_PEOPLE)},
        }
        self._handlers = {name: self._handler(name, work) for name, work in methods.items()}

    def service(self, details: Any) -> Any:
        """Return what handles a call, None if there is no such method."""
        return self._handlers.get(details.method)

    def close(self) -> None:
        """Let the threads end."""
        kinds = self._for_people, self._for_peers, self._for_servers, self._for_heartbeats, self._for_values
        for threads in kinds:
            threads.close()

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
            if not is_open:
                self._connections.know(context.peer())
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
        """Return what answers a method of one small message in each direction."""
        method, request_type = getattr(self._servicer, name), getattr(pb2, f"{name}Request")
        threads = {"Commit": self._for_servers, "Heartbeat": self._for_heartbeats, "Leave": self._for_peers}
        pool = threads.get(name, self._for_people)

        async def answer(call: _Call, message: bytes) -> None:
            request = _small(name, request_type, message)
            whose: Hashable = Caller.of(request.caller) if name in _OF_PEERS else call.origin.address
            await call.write(await pool.run(whose, lambda: method(request, call.origin)))

        return answer

    def _place_for(self, call: _Call, message: bytes) -> AbstractContextManager[None]:
        """Count a message that takes much memory as long as it is worked on.

        Raises:
            Refusal: there are too many.
        """
        counts = f"{_LARGE_REQUESTS} large requests, or {_LARGE_OF_AN_ADDRESS} of an address,"
        refusal = Refusal("later", f"{counts} are being answered; try again")
        return self._large.taken(call.origin.address, refusal, count=len(message) > _SMALL_BYTES)

    async def _shard(self, call: _Call, message: bytes) -> None:
        def shard() -> Any:
            return self._servicer.Shard(pb2.ShardRequest.FromString(message), call.origin)

        with self._place_for(call, message):
            await call.write(await self._for_servers.run(call.origin.address, shard))

    async def _register(self, call: _Call, message: bytes) -> None:
        def register() -> Any:
            return self._servicer.Register(pb2.RegisterRequest.FromString(message), call.origin)

        async def once() -> Any:
            with self._place_for(call, message):
                return await self._for_peers.run(call.origin.address, register)

        try:
            reply = await once()
        except NameInUse as in_use:
            # The other process may have been killed: then it says nothing until its time is over.
            wait = min(max(0.0, in_use.until - time.monotonic()) + 0.05, call.seconds_to_wait)
            with self._registers.taken((in_use.run, in_use.peer), self._too_many_wait(in_use.peer, "later")):
                await asyncio.sleep(wait)
            try:
                reply = await once()
            except NameInUse as still:
                if still.until != in_use.until:
                    raise  # it has said something since
                raise Refusal("later", f"{still}; that one has said nothing for {wait:.0f} s, so try again") from None
        await call.write(reply)

    def _waiting(self, name: str) -> Callable[[_Call, bytes], Awaitable[None]]:
        """Return what answers a method that waits, whose state 0 says that it does."""
        method, request_type = getattr(self._servicer, name), getattr(pb2, f"{name}Request")

        async def answer(call: _Call, message: bytes) -> None:
            request = _small(name, request_type, message)
            caller = Caller.of(request.caller)
            seconds = min(request.seconds, MAX_WAIT_SECONDS) if request.seconds > 0 else 0.0  # of NaN, too
            end = self._loop.time() + min(seconds, call.seconds_to_wait)
            with self._servicer.awaited(request).watched() as changed:

                async def look() -> Any:
                    changed.clear()
                    return await self._for_peers.run(caller, lambda: method(request, call.origin))

                reply = await look()
                if not reply.state and self._loop.time() < end:
                    # Who only says that it is a member has been refused by now.
                    with self._awaits.taken(caller.member, self._too_many_wait(caller.peer, "full")):
                        while not reply.state and (left := end - self._loop.time()) > 0:
                            with suppress(TimeoutError):
                                await asyncio.wait_for(changed.wait(), left)
                            reply = await look()
            await call.write(reply)

        return answer

    async def _upload(self, call: _Call, message: bytes) -> None:
        if len(message) > _SMALL_BYTES:
            raise Refusal(
                "invalid",
                f"an upload's first message has {len(message)} bytes, and says only who calls; install the release of "
                "the server at the peer",
            )
        with self._not_known(call):
            upload = await self._for_values.run(call.origin.address, lambda: self._servicer.Upload(message))
            await self._know(upload)
        caller = upload.caller
        with self._uploads.stream(caller.member, f"peer {caller.peer!r}"):
            is_over = await self._for_values.run(caller, upload.take_first)
            while not is_over:
                async with self._uploads.message(caller.member):
                    further = await call.read()
                    is_over = further is None or await self._for_values.run(caller, partial(upload.take, further))
        await call.write(upload.reply)

    async def _download(self, call: _Call, message: bytes) -> None:
        def download_of() -> Any:
            return self._servicer.Download(pb2.DownloadRequest.FromString(message))

        with self._not_known(call):
            with self._place_for(call, message):
                download = await self._for_values.run(call.origin.address, download_of)
            await self._know(download)
        caller, slices = download.caller, self._config.peer_slices
        too_many = (
            f"peer {caller.peer!r} asks for more slices in its open downloads than peer_slices of the server allows, "
            f"{slices}; use fewer ranks or streams, or raise peer_slices"
        )
        try:
            with (
                self._downloads.stream(caller.member, f"peer {caller.peer!r}"),
                self._slices.taken(caller.member, Refusal("full", too_many), download.slices),
            ):
                is_over = False
                while not is_over:
                    async with self._downloads.message(caller.member):
                        packed = await self._for_values.run(caller, download.next)
                        is_over = packed is None
                        if not is_over:
                            await call.context.write(packed)
        finally:
            # Once the step that was under way is over, should the call have been cancelled in it.
            self._for_values.begin(caller, download.close)

    def _not_known(self, call: _Call) -> AbstractContextManager[None]:
        """Count a call as long as its caller may be anybody.

        Raises:
            Refusal: there are too many from its address.
        """
        most = self._config.peer_streams
        full = f"{most} calls from {call.origin.address} say who they are, as many as peer_streams of the server allows"
        return self._unknown.taken(call.origin.address, Refusal("later", f"{full} a peer; try again"))

    async def _know(self, values: Any) -> None:
        """Check who has made an upload or download: from now on what it takes is its peer's.

        Raises:
            Refusal: nobody who may.
        """
        await values.hear()
        await self._for_values.run(values.caller, values.check)

    def _too_many_wait(self, peer: str, reason: Reason) -> Refusal:
        most = self._config.peer_waiting_calls
        return Refusal(
            reason,
            f"{most} calls wait for a round of peer {peer!r}, or for its place, as many as peer_waiting_calls of the "
            "server allows; end those that nobody needs, or raise peer_waiting_calls",
        )

    async def _check(self, call: _Call, message: bytes) -> None:
        await call.write(self._health.check(_asked(message)))

    async def _watch(self, call: _Call, message: bytes) -> None:
        async with aclosing(self._health.watch(_asked(message), call.origin.address)) as replies:
            async for reply in replies:
                await call.write(reply)


def _asked(message: bytes) -> Any:
    """Return what somebody asks of the health, who may be anybody.

    Raises:
        Refusal: it is more than a name.
    """
    if len(message) > _SMALL_BYTES:
        raise Refusal("invalid", f"a question about the health has {len(message)} bytes, and asks only for a name")
    return health_pb2.HealthCheckRequest.FromString(message)


def _small(method: str, kind: Any, message: bytes) -> Any:
    """Return a request that is read in the event loop, since it is small.

    Raises:
        Refusal: it is not.
    """
    if len(message) > _SMALL_BYTES:
        raise Refusal("invalid", f"a request of {method} has {len(message)} bytes; {_SMALL_BYTES} are enough")
    return kind.FromString(message)


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
        return grpc.StatusCode.RESOURCE_EXHAUSTED, f"the server cannot write: {described(error)}"
    log.error("%s has failed", method, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"the server has failed in {method} ({type(error).__name__}); its log says more"
