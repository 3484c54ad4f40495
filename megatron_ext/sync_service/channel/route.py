# SPDX-License-Identifier: Apache-2.0
"""Which server a peer talks to about which tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.sync_service.channel.connection import Connection
from megatron_ext.sync_service.protocol.catalog import Catalog

__all__ = ["Route"]


class Route:
    """The connections of a process to the servers of a run. The first one has everything unless said otherwise."""

    def __init__(self, first: Connection) -> None:
        """Take the connection to the server that the peer was given."""
        self.first = first
        self.connections = [first]
        self._shard_of: dict[str, int] = {}

    def lead(self, addresses: Sequence[str], catalog: Catalog, shard_of: Sequence[int]) -> None:
        """Say which servers have parts of the values.

        Args:
            addresses: of all of them, the first one first; none where that has everything.
            catalog: the tensors.
            shard_of: which server has a tensor, in the order of the catalog.

        Raises:
            UserError: one would be reached unencrypted.
        """
        for connection in self.connections[1:]:
            connection.close()
        others = [Connection(replace(self.first.config, server=address)) for address in addresses[1:]]
        self.connections = [self.first, *others]
        names = [spec.name for spec in catalog]
        self._shard_of = dict(zip(names, shard_of, strict=True)) if addresses else {}

    def leads(self, at: int, name: str) -> bool:
        """Return whether it is this one of the connections that leads to a tensor."""
        return self._shard_of.get(name, 0) == at

    def close(self) -> None:
        """Close the connections until the next call."""
        for connection in self.connections:
            connection.close()

    def abandon(self) -> None:
        """End all calls, those of other threads too, and let there be no further one."""
        for connection in self.connections:
            connection.abandon()

    def take_traffic(self) -> tuple[int, int]:
        """Return the bytes that were sent and received since this was asked the last time."""
        traffic = [connection.take_traffic() for connection in self.connections]
        return sum(sent for sent, _ in traffic), sum(received for _, received in traffic)
