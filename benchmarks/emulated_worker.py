# SPDX-License-Identifier: Apache-2.0
"""A worker of `benchmarks.simulated` in a network namespace: measures what it is told to, an order a line of JSON.

A step is a pause, as long as a GPU would compute while the processor waits, so that workers do not fight for the cores
of a small machine.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

import torch
import torch.distributed as dist

PROBE_PORT = 41999
_EXCHANGES = 3
"""That are measured, after one that makes connections."""


def main() -> None:
    """Join the others, then serve orders from standard input until it is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--addresses", nargs="+", required=True)
    rank, addresses = (options := parser.parse_args()).rank, options.addresses
    torch.set_num_threads(1)
    master = f"tcp://{addresses[0]}:41998"
    dist.init_process_group("gloo", init_method=master, rank=rank, world_size=len(addresses))
    print(json.dumps({"ready": rank}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        kind = {"probe": probe, "synchronous": synchronous, "local_sgd": local_sgd, "service": service}[order["kind"]]
        dist.barrier()
        print(json.dumps(kind(order, rank, addresses)), flush=True)


def probe(order: dict[str, Any], rank: int, addresses: list[str]) -> dict[str, Any]:
    """Measure the links: one stream's bytes per second and a message's time, and what a worker sends when all do."""
    measured = _ring if order["is_ring"] else _exchange
    seconds, nbytes = measured(order["sent"] // 4, order["buffers"], rank, len(addresses))
    return {**_stream(order, rank, addresses), "exchange": nbytes / seconds}


def _exchange(values: int, buffers: int, rank: int, workers: int) -> tuple[float, int]:
    """Return seconds and bytes of one way of a round that does nothing with what it moves.

    Args:
        values: fp32, of the message.
        buffers: in which it travels, side by side: a round has one for a layer.
        rank: of this worker.
        workers: how many.
    """
    from megatron_ext.transport.collectives import Exchange, ExchangeMemory

    tensors, memory = [torch.zeros(values // buffers) for _ in range(buffers)], ExchangeMemory()

    def both_ways() -> None:
        group = dist.group.WORLD
        exchanges = [Exchange(index, (one,), group, memory).start() for index, one in enumerate(tensors)]
        for exchange in exchanges:
            exchange.arrived()
        for exchange in exchanges:
            exchange.return_own()
        for exchange in exchanges:
            exchange.finish()

    return _seconds(both_ways) / 2, 4 * values * (workers - 1) // workers


def _ring(values: int, buffers: int, rank: int, workers: int) -> tuple[float, int]:
    """Return seconds and bytes of a message that every worker sends to the next one, as in a ring's all-reduce."""
    count = 2 * values * (workers - 1) // workers
    received, sent = torch.zeros(count), torch.zeros(count)
    left, right = (rank - 1) % workers, (rank + 1) % workers

    def around() -> None:
        operations = [dist.P2POp(dist.irecv, received, left), dist.P2POp(dist.isend, sent, right)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return _seconds(around), 4 * count


def _seconds(exchange: Callable[[], None]) -> float:
    measured = []
    for _ in range(_EXCHANGES + 1):
        dist.barrier()
        begun = time.perf_counter()
        exchange()
        measured.append(time.perf_counter() - begun)
    return statistics.median(measured[1:])


def _stream(order: dict[str, Any], rank: int, addresses: list[str]) -> dict[str, Any]:
    """Measure the link from the first worker to the second; only the first one knows."""
    if rank > 1:
        dist.barrier()
        return {}
    if rank == 1:
        with socket.create_server((addresses[1], PROBE_PORT)) as server:
            dist.barrier()
            connection, _ = server.accept()
            with connection:
                left = order["nbytes"]
                while left:
                    left -= len(connection.recv(min(left, 1 << 20)))
                connection.sendall(b"!")
                for _ in range(order["messages"]):
                    connection.sendall(connection.recv(1))
        return {}
    dist.barrier()
    with socket.create_connection((addresses[1], PROBE_PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun = time.perf_counter()
        connection.sendall(bytes(order["nbytes"]))
        connection.recv(1)
        seconds = time.perf_counter() - begun
        trips = []
        for _ in range(order["messages"]):
            begun = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - begun)
    return {"bytes_per_second": order["nbytes"] / seconds, "latency": statistics.median(trips) / 2}


class _Clock:
    """Steps that are pauses, and how long they really were."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.steps: list[float] = []

    def step(self) -> None:
        begun = time.perf_counter()
        time.sleep(self._seconds)
        self.steps.append(time.perf_counter() - begun)

    def begin(self) -> float:
        """Forget what was before, and return the time."""
        self.steps = []
        return time.perf_counter()


def _told(clock: _Clock, begun: float, **more: Any) -> dict[str, Any]:
    return {"seconds": time.perf_counter() - begun, "steps": clock.steps, **more}


def synchronous(order: dict[str, Any], rank: int, addresses: list[str]) -> dict[str, Any]:
    """All workers reduce bf16 gradients in every step."""
    gradient, clock = torch.zeros(order["values"], dtype=torch.bfloat16), _Clock(order["step_seconds"])
    begun = 0.0
    for step in range(order["intervals"] + 1):
        if step == 1:
            dist.barrier()
            begun = clock.begin()
        clock.step()
        dist.all_reduce(gradient)
    return _told(clock, begun)


def local_sgd(order: dict[str, Any], rank: int, addresses: list[str]) -> dict[str, Any]:
    """Workers meet as the order says."""
    from megatron_ext.local_sgd import LocalSGDConfig, StreamingConfig
    from megatron_ext.local_sgd.plain_torch import OuterOptimPeriodicModelAverager

    layers = order["layers"]
    values = [torch.zeros(order["values"] // layers) for _ in range(layers)]
    clock, rounds = _Clock(order["step_seconds"]), Path(order["log"])
    averager = OuterOptimPeriodicModelAverager(
        local_sgd_config=LocalSGDConfig(
            local_sgd_sync_interval=order["interval"], codec=order["codec"], local_sgd_round_log=str(rounds)
        ),
        streaming_config=StreamingConfig(
            fragments=order["fragments"], sync_delay=order["delay"], update_alpha=0.5 if order["delay"] else 0.0
        ),
    )
    averager.attach([(f"layers.{layer}.weight", value) for layer, value in enumerate(values)])
    generator = torch.Generator().manual_seed(rank)
    changes = torch.randn(order["values"] // layers, generator=generator)
    begun = 0.0
    for interval in range(order["intervals"] + 1):
        if interval == 1:
            dist.barrier()
            begun = clock.begin()
        for _ in range(order["interval"]):
            clock.step()
            for value in values[:1]:
                value += changes
            averager.average_parameters()
    told = _told(clock, begun)
    averager.synchronize()  # a round in flight would meet the messages of the next order
    if rank == 0:
        lines = [json.loads(line) for line in rounds.read_text(encoding="utf-8").splitlines()]
        counted = lines[order["fragments"] :]  # the first interval's have made their memory
        told["work"] = sum(line["applying_seconds"] for line in counted) / len(counted) * order["fragments"]
        told["bytes"] = sum(line["bytes_sent"] for line in counted) / len(counted) * order["fragments"]
    return told


def service(order: dict[str, Any], rank: int, addresses: list[str]) -> dict[str, Any]:
    """Workers are peers of a sync service."""
    from benchmarks.byte_relay import ByteRelay
    from megatron_ext.sync_service.channel.connection import ConnectionConfig
    from megatron_ext.sync_service.peer.client import ClientConfig, Report, SyncClient

    layers = order["layers"]
    values = {f"layers.{layer}.weight": torch.zeros(order["values"] // layers) for layer in range(layers)}
    server, stack = order["server"], ExitStack()
    if order["way_seconds"]:
        # At the peer's end of its link.
        host, _, port = server.rpartition(":")
        server = stack.enter_context(ByteRelay(int(port), host=host, seconds=order["way_seconds"])).address
    config = ClientConfig(
        connection=ConnectionConfig(server=server, insecure=True),
        run=order["run"],
        peer=f"peer-{rank}",
        index=rank,
        codec=order["codec"],
    )
    clock = _Clock(order["step_seconds"])
    generator = torch.Generator().manual_seed(rank)
    changes = torch.randn(order["values"] // layers, generator=generator)
    begun = 0.0
    with stack, SyncClient(config, values) as client:
        values = client.start(values)
        for interval in range(order["intervals"] + 1):
            if interval == 1:
                dist.barrier()
                begun = clock.begin()
            for _ in range(order["interval"]):
                clock.step()
            values = {name: value + changes for name, value in values.items()}
            values = client.sync(values, Report(steps=order["interval"])).values
        told = _told(clock, begun)
        client.leave()
    return told


if __name__ == "__main__":
    main()
