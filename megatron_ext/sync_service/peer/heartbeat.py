# SPDX-License-Identifier: Apache-2.0
"""A peer's word that it is alive, every few seconds, from a thread."""

from __future__ import annotations

import os
import threading
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.protocol.durations import ALIVE_HEARTBEATS
from megatron_ext.sync_service.protocol.protocol import pb2

__all__ = ["Heartbeat"]

_CALL_SECONDS = 2.0
"""How long one may take, and so how long it may keep a process from forking."""

_IN_FLIGHT = threading.Lock()
"""Held as long as a heartbeat is in flight."""


class Heartbeat:
    """Says that a process is alive until `stop`.

    Every heartbeat has a connection of its own, and while there is one the process does not fork: gRPC's connections do
    not survive that, and data loaders and writers of checkpoints fork at any time.
    """

    def __init__(self, connection: ConnectionConfig, caller: Any, seconds: float) -> None:
        """Begin.

        Args:
            connection: to the server.
            caller: the peer, as a message of the protocol.
            seconds: between two heartbeats.
        """
        _guard_forks()
        self._connection = replace(connection, patience_seconds=0.0, call_seconds=_CALL_SECONDS)
        self._caller = caller
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Say that this process gives its place to whoever wants it, and no more."""
        self._stopped.set()
        self._thread.join()
        self._say(0.0)

    def _beat(self) -> None:
        while not self._stopped.wait(self._seconds):
            self._say(ALIVE_HEARTBEATS * self._seconds)

    def _say(self, alive_seconds: float) -> None:
        request = pb2.HeartbeatRequest(caller=self._caller, alive_seconds=alive_seconds)
        # The server may be away, or a file, or another process in this one's place: the next round's calls say so.
        with _IN_FLIGHT, suppress(UserError), closing(Connection(self._connection)) as connection:
            connection.call("Heartbeat", request)


@cache
def _guard_forks() -> None:
    """Let forks of this process wait for the heartbeat that is in flight."""
    release = _IN_FLIGHT.release
    os.register_at_fork(before=_IN_FLIGHT.acquire, after_in_parent=release, after_in_child=release)
