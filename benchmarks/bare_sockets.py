# SPDX-License-Identifier: Apache-2.0
"""Plain TCP sockets in place of gRPC's streams: a server that throws away what it gets and sends zeros, and a client.

python -m benchmarks.bare_sockets     prints its port, and serves until its input is closed

Neither encrypted nor checked: what no way of moving values beside gRPC can be faster than.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.bare_messages import messages, parts_of

__all__ = ["SocketClient"]

_UP, _DOWN, _TAKEN = b"u", b"d", b"k"
_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20


class SocketClient:
    """Move a number of bytes over a number of connections."""

    def __init__(self, address: str, streams: int) -> None:
        host, _, port = address.rpartition(":")
        self._connections = [socket.create_connection((host, int(port))) for _ in range(streams)]
        self._pool = ThreadPoolExecutor(streams)

    def upload(self, count: int) -> None:
        """Send bytes."""

        def send(connection: socket.socket, part: int) -> None:
            connection.sendall(_UP + part.to_bytes(_LENGTH_BYTES))
            _send(connection, part)
            if connection.recv(1) != _TAKEN:
                raise RuntimeError("the bare socket has lost bytes")

        self._on_each(send, count)

    def download(self, count: int) -> None:
        """Receive bytes."""

        def take(connection: socket.socket, part: int) -> None:
            connection.sendall(_DOWN + part.to_bytes(_LENGTH_BYTES))
            if _receive(connection, part):
                raise RuntimeError("the bare socket has lost bytes")

        self._on_each(take, count)

    def _on_each(self, move: Callable[[socket.socket, int], None], count: int) -> None:
        list(self._pool.map(move, self._connections, parts_of(count, len(self._connections))))


def _send(connection: socket.socket, count: int) -> None:
    for message in messages(count):
        connection.sendall(message)


def _receive(connection: socket.socket, count: int) -> int:
    """Return how many bytes are missing at the end."""
    memory = memoryview(bytearray(_READ_BYTES))
    while count:
        found = connection.recv_into(memory[: min(count, len(memory))])
        if not found:
            break
        count -= found
    return count


def _answer(connection: socket.socket) -> None:
    with connection:
        while head := connection.recv(1 + _LENGTH_BYTES, socket.MSG_WAITALL):
            count = int.from_bytes(head[1:])
            if head[:1] == _DOWN:
                _send(connection, count)
            elif _receive(connection, count) == 0:
                connection.sendall(_TAKEN)


def _serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=_answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
