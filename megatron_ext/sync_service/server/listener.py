# SPDX-License-Identifier: Apache-2.0
"""The server's port: gRPC's asynchronous server, in an event loop with a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megatron_ext.errors import UserError
from megatron_ext.sync_service.callers.connections import Connections
from megatron_ext.sync_service.protocol.protocol import MAX_MESSAGE, grpc
from megatron_ext.sync_service.server.calls import Calls

__all__ = ["Listener"]

_T = TypeVar("_T")

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # Two servers at one port would each get a part of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # gRPC would let the window of a stream grow with the link, and with it what hostile callers make it hold.
    ("grpc.http2.bdp_probe", 0),
    # Of who connects and then says nothing.
    ("grpc.server_handshake_timeout_ms", 20_000),
]

_LONGEST_MS = (1 << 31) - 1
"""That gRPC can take: almost 25 days."""


class Listener:
    """A port, at which no call is answered before `start`.

    Attributes:
        port: its number.
        connections: at it.
    """

    def __init__(self, bind: str, credentials: Any, connections: int, idle_seconds: float, window: int) -> None:
        """Take the port.

        Args:
            bind: ADDRESS:PORT; port 0 for one that the system chooses.
            credentials: gRPC's, for TLS; None without.
            connections: how many there may be.
            idle_seconds: how long one may be without a call.
            window: bytes of a stream that may come in before anybody reads them.

        Raises:
            UserError: it is not available.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="listener", daemon=True)
        self._thread.start()
        self._calls: Calls | None = None
        self._server: Any = None

        options = [
            *_OPTIONS,
            # More are closed before a byte of them is read.
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.http2.lookahead_bytes", window),
            ("grpc.max_connection_idle_ms", min(max(1, round(1000 * idle_seconds)), _LONGEST_MS)),
        ]

        async def listen() -> int:
            self._server = grpc.aio.server(options=options)
            if credentials is None:
                return int(self._server.add_insecure_port(bind))
            return int(self._server.add_secure_port(bind, credentials))

        try:
            self.port = self._wait_for(listen())
        except RuntimeError as error:
            self.stop(0.0)
            raise UserError(f"bind {bind}: cannot listen there: {error}") from error
        self.connections = Connections(self.port, connections, connections // 4)

    def start(self, calls: Callable[[], Calls]) -> None:
        """Answer calls, by what `calls` makes in the event loop."""

        async def start() -> None:
            self._calls = calls()
            self._server.add_generic_rpc_handlers((self._calls,))
            await self._server.start()

        self._wait_for(start())
        self.connections.start()

    def stop(self, seconds: float) -> None:
        """End all calls, after some seconds for those that are about to end by themselves."""
        if not self._loop.is_running():
            return

        async def stop() -> None:
            if self._server is not None:
                await self._server.stop(seconds)

        self._wait_for(stop())
        if self._calls is not None:
            self.connections.close()
            self._calls.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait_for(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
