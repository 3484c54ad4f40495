# SPDX-License-Identifier: Apache-2.0
"""Bare gRPC streams: a server that throws away what it gets and sends zeros, and a client of it.

python -m benchmarks.bare_stream     prints its port, and serves until its input is closed
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.bare_messages import messages, parts_of
from megatron_ext.sync_service.protocol.protocol import MAX_MESSAGE, grpc

__all__ = ["BareClient"]

_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.max_send_message_length", MAX_MESSAGE)]


class BareClient:
    """Move a number of bytes in a number of streams."""

    def __init__(self, address: str, streams: int) -> None:
        self._channel = grpc.insecure_channel(address, [*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
        self._up = self._channel.stream_unary("/bare/Up")
        self._down = self._channel.unary_stream("/bare/Down")
        self._pool = ThreadPoolExecutor(streams)
        self._streams = streams

    def upload(self, count: int) -> None:
        """Send bytes."""
        list(self._pool.map(lambda part: self._up(messages(part)), parts_of(count, self._streams)))

    def download(self, count: int) -> None:
        """Receive bytes."""

        def take(part: int) -> int:
            return sum(len(message) for message in self._down(part.to_bytes(8)))

        if sum(self._pool.map(take, parts_of(count, self._streams))) != count:
            raise RuntimeError("the bare stream has lost bytes")


def _up(sent: Iterator[bytes], _context: Any) -> bytes:
    return sum(len(message) for message in sent).to_bytes(8)


def _down(request: bytes, _context: Any) -> Iterator[bytes]:
    return messages(int.from_bytes(request))


def _serve() -> None:
    server = grpc.server(ThreadPoolExecutor(64), options=_OPTIONS)
    methods = {
        "Up": grpc.stream_unary_rpc_method_handler(_up),
        "Down": grpc.unary_stream_rpc_method_handler(_down),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None)


if __name__ == "__main__":
    _serve()
