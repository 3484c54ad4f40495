# SPDX-License-Identifier: Apache-2.0
"""Seeing which values a client gets, in whatever call they come."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_ext.sync_service.peer.client import SyncClient

Received = tuple[str, int, str, str]
"""Peer, round, tensor and codec of a frame."""


def watch(client: SyncClient, received: list[Received]) -> None:
    """Add every frame that a client gets from now on to a list."""
    connection = client._connection
    begin, stream = connection.begin, connection.stream

    def seen(number: int, messages: Iterator[Any]) -> Iterator[Any]:
        for batch in messages:
            received.extend((client.config.peer, number, frame.name, frame.codec) for frame in batch.frames)
            yield batch

    connection.begin = lambda method, request: _Call(begin(method, request), partial(seen, request.round))
    connection.stream = lambda method, request, streams: seen(request.round, stream(method, request, streams))


@dataclass(eq=False)
class _Call:
    call: Any
    seen: Callable[[Iterator[Any]], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.seen(self.call)

    def cancel(self) -> None:
        self.call.cancel()
