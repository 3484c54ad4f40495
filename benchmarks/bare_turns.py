# SPDX-License-Identifier: Apache-2.0
"""Moving the bytes of a round and nothing else, in turns with rounds: with gRPC's streams and with plain sockets."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.process_use import processor_seconds

__all__ = ["GRPC", "SOCKETS", "BareServer", "Bytes", "bare_turns", "start_bare"]

REPOSITORY = Path(__file__).resolve().parents[1]

GRPC, SOCKETS = "grpc", "sockets"
_BARE = {GRPC: "benchmarks.bare_stream", SOCKETS: "benchmarks.bare_sockets"}
"""What moves bytes and nothing else, and its module."""


@dataclass(frozen=True, kw_only=True)
class BareServer:
    """A server that throws away what it gets and sends zeros."""

    address: str
    """Where it listens."""

    pid: int
    """Its process."""


@dataclass(kw_only=True)
class Bytes:
    """What one peer measured of moving bytes and nothing else, turn by turn."""

    seconds: list[float] = field(default_factory=list)
    """Wall time."""

    cpu: list[float] = field(default_factory=list)
    """Seconds of this peer's processors."""

    server_cpu: list[float] = field(default_factory=list)
    """Seconds of the server's processors."""


@contextmanager
def start_bare(kind: str) -> Iterator[BareServer]:
    """Run a server of bare streams, GRPC or SOCKETS, until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", _BARE[kind]], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield BareServer(address=f"127.0.0.1:{int(process.stdout.readline())}", pid=process.pid)
    finally:
        process.stdin.close()
        process.wait()


def bare_turns(
    servers: Mapping[str, BareServer], up: int, down: int, streams: int, found: Mapping[str, Bytes]
) -> Callable[[], None]:
    """Return what moves bytes once with each bare server, and writes down what that took."""
    import torch.distributed as dist

    from benchmarks.bare_sockets import SocketClient
    from benchmarks.bare_stream import BareClient

    kinds: dict[str, Callable[[str, int], BareClient | SocketClient]] = {GRPC: BareClient, SOCKETS: SocketClient}
    clients = {kind: kinds[kind](server.address, streams) for kind, server in servers.items()}

    def turn() -> None:
        for kind, client in clients.items():
            dist.barrier()
            cpu, own, began = processor_seconds(servers[kind].pid), time.process_time(), time.perf_counter()
            client.upload(up)
            # A round as well has everything before it gives anything back.
            dist.barrier()
            client.download(down)
            dist.barrier()
            found[kind].seconds.append(time.perf_counter() - began)
            found[kind].cpu.append(time.process_time() - own)
            found[kind].server_cpu.append(processor_seconds(servers[kind].pid) - cpu)

    return turn
