# SPDX-License-Identifier: Apache-2.0
"""A TCP relay that counts what a connection really carries, with everything that protocols add to messages, and that
can make a link narrow or long.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Self

__all__ = ["ByteRelay"]

_CHUNK = 1 << 18
_SLOW_CHUNK = 1 << 16


class ByteRelay:
    """Listens on this machine, and passes on what it gets to another port and back.

    Attributes:
        up: bytes that came from callers.
        down: bytes that came from the other port.
        most_in_flight: bytes of a connection that were in flight at a time, of those that came from its caller.
    """

    def __init__(
        self, port: int, *, host: str = "127.0.0.1", rate: float | None = None, seconds: float = 0.0
    ) -> None:
        """Begin to listen.

        Args:
            port: where to pass it on to.
            host: on which machine that is.
            rate: bytes per second of a connection in each direction; as fast as can be when None.
            seconds: how long everything is in flight, in each direction.
        """
        self._seconds = seconds
        self._pause = 0.0 if rate is None else 1 / rate
        self._chunk = _CHUNK if rate is None else _SLOW_CHUNK
        self.up = 0
        self.down = 0
        self.most_in_flight = 0
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        if rate is not None:
            # What stands in buffers is no longer the sender's, whose pace would not be the link's.
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_CHUNK)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def total(self) -> int:
        """Bytes in both directions so far."""
        return self.up + self.down

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._pass_on, args=(caller, server, True), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, caller, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, receiver: socket.socket, is_up: bool) -> None:
        target = _Late(receiver, self._seconds, self if is_up else None) if self._seconds else receiver
        try:
            while data := source.recv(self._chunk):
                if is_up:
                    self.up += len(data)
                else:
                    self.down += len(data)
                target.sendall(data)
                if self._pause:
                    time.sleep(len(data) * self._pause)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # either side is gone
            source.close()
            target.close()


class _Late:
    """Sends to a socket what it gets, in order and some seconds later; tells the relay how much is in flight."""

    def __init__(self, target: socket.socket, seconds: float, relay: ByteRelay | None) -> None:
        self._target, self._seconds, self._relay = target, seconds, relay
        self._begun = self._arrived = 0
        self._waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def sendall(self, data: bytes) -> None:
        """Let bytes set out."""
        self._waiting.put((time.monotonic() + self._seconds, data))
        self._begun += len(data)
        if self._relay is not None:
            self._relay.most_in_flight = max(self._relay.most_in_flight, self._begun - self._arrived)

    def shutdown(self, how: int) -> None:
        """Let the end set out."""
        self._waiting.put((time.monotonic() + self._seconds, b""))

    def close(self) -> None:
        """End the connection."""
        self._target.close()

    def _send(self) -> None:
        try:
            while True:
                due, data = self._waiting.get()
                time.sleep(max(due - time.monotonic(), 0.0))
                if not data:
                    self._target.shutdown(socket.SHUT_WR)
                    return
                self._arrived += len(data)
                self._target.sendall(data)
        except OSError:  # the other side is gone
            self._target.close()
