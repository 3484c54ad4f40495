# SPDX-License-Identifier: Apache-2.0
"""Peers of a sync service that train nothing, as threads of a few processes."""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

from benchmarks.process_use import processor_seconds

__all__ = ["SyntheticPeers"]


class SyntheticPeers:
    """Peers that make rounds when told."""

    def __init__(self, address: str, peers: int, options: argparse.Namespace) -> None:
        """Start them, and let all register and begin with the same values.

        Args:
            address: of the first server.
            peers: how many.
            options: `values` of each, `tensors` among which they are divided, and `processes` of the peers.
        """
        context = multiprocessing.get_context("spawn")
        size = -(-options.values // options.tensors)
        self._processes: list[tuple[BaseProcess, Connection]] = []
        for number in range(min(options.processes, peers)):
            ours, theirs = context.Pipe()
            indices = range(number, peers, options.processes)
            process = context.Process(
                target=_serve, args=(theirs, address, indices, size, options.tensors), daemon=True
            )
            process.start()
            self._processes.append((process, ours))
        self._all_answer()

    def __enter__(self) -> SyntheticPeers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for process, pipe in self._processes:
            if kind is None:
                pipe.send(0)
            else:
                process.kill()
        for process, _ in self._processes:
            process.join()

    def rounds(self, count: int) -> None:
        """Let all make that many rounds, one after the other, and return when the last peer has made its last one."""
        if count:
            for _, pipe in self._processes:
                pipe.send(count)
            self._all_answer()

    def processor_seconds(self) -> float:
        """Return the seconds of processors that all peers have taken."""
        return sum(processor_seconds(process.pid) for process, _ in self._processes if process.pid is not None)

    def _all_answer(self) -> None:
        for _, pipe in self._processes:
            problem = pipe.recv()
            if problem:
                raise RuntimeError(f"a peer has failed: {problem}")


def _serve(pipe: Connection, address: str, indices: range, size: int, tensors: int) -> None:
    """Run in a process: be these peers, and make as many rounds as the pipe says, until it says 0."""
    import torch

    from megatron_ext.sync_service.channel.connection import ConnectionConfig
    from megatron_ext.sync_service.peer.client import ClientConfig, SyncClient

    torch.set_num_threads(1)
    start = {f"layer.{number}": torch.zeros(size) for number in range(tensors)}
    connection = ConnectionConfig(server=address)
    clients = []
    with ThreadPoolExecutor(len(indices)) as threads:

        def begin(index: int) -> SyncClient:
            config = ClientConfig(connection=connection, run="load", peer=f"peer-{index}", index=index, streams=1)
            client = SyncClient(config, start)
            client.start(start)
            return client

        def make(client: SyncClient, count: int) -> None:
            values = dict(start)
            for number in range(count):
                values = client.sync({name: value + 0.001 * number for name, value in values.items()}).values

        try:
            clients = list(threads.map(begin, indices))
            pipe.send("")
            while count := pipe.recv():
                list(threads.map(make, clients, [count] * len(clients)))
                pipe.send("")
        except Exception as error:  # the measuring process says what has ended it
            pipe.send(f"{type(error).__name__}: {error}")
            return
        list(threads.map(SyncClient.leave, clients))
        list(threads.map(SyncClient.close, clients))
