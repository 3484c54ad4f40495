# SPDX-License-Identifier: Apache-2.0
"""Seeing which values a client gets, in whatever call they come."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ext.sync_service.client import SyncClient

Received = tuple[str, int, str, str]
"""Peer, round, tensor and codec of a frame."""


def watch(client: SyncClient, received: list[Received]) -> None:
    """Add every frame that a client gets from now on to a list."""
    begin = client._connection.begin

    def watched(method: str, request: Any) -> _Call:
        return _Call(begin(method, request), client.config.peer, request.round, received)

    client._connection.begin = watched


@dataclass(eq=False)
class _Call:
    call: Any
    peer: str
    number: int
    received: list[Received]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.call:
            self.received.extend((self.peer, self.number, frame.name, frame.codec) for frame in batch.frames)
            yield batch

    def cancel(self) -> None:
        self.call.cancel()
