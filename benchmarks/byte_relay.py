# SPDX-License-Identifier: Apache-2.0
"""A TCP relay that counts: what a connection really carries, with everything that protocols add to messages."""

from __future__ import annotations

import socket
import threading
import time
from typing import Self

__all__ = ["ByteRelay"]

_CHUNK = 1 << 18
_SLOW_CHUNK = 1 << 16


class ByteRelay:
    """Listens on this machine, and passes on what it gets to another port of it and back."""

    def __init__(self, port: int, *, rate: float | None = None) -> None:
        """Begin to listen.

        Args:
            port: where to pass it on to.
            rate: bytes per second of a connection in each direction; as fast as can be when None.
        """
        self._pause = 0.0 if rate is None else 1 / rate
        self._chunk = _CHUNK if rate is None else _SLOW_CHUNK
        self.up = 0
        self.down = 0
        self._target = port
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
            server = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._pass_on, args=(caller, server, True), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, caller, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
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
