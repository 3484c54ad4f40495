# SPDX-License-Identifier: Apache-2.0
"""Taking the values of a committed round from the server, in parallel streams."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron_ext.sync_service.channel.connection import Connection, DamagedOnTheWay
from megatron_ext.sync_service.channel.route import Route
from megatron_ext.sync_service.channel.streams import Streams
from megatron_ext.sync_service.peer.ahead import Taken
from megatron_ext.sync_service.peer.incoming import Incoming, Place
from megatron_ext.sync_service.peer.parts import Part, Values, by_place
from megatron_ext.sync_service.protocol.protocol import pb2

__all__ = ["download"]


def download(
    route: Route,
    pool: ThreadPoolExecutor,
    caller: Any,
    parts: Sequence[Part],
    number: int,
    streams: int,
    expected: Values | None = None,
    before: Values | None = None,
    ahead: Taken | None = None,
    out: Values | None = None,
) -> dict[str, torch.Tensor]:
    """Return the values that a round has for parts.

    Args:
        route: to the servers.
        pool: has a thread per stream.
        caller: the peer, as a message of the protocol.
        parts: what is wanted; parts with the same elements share the memory of their values.
        number: the round.
        streams: into how many shares of about the same size what comes from a server is cut.
        expected: values that the round should have for some parts, by their keys. The server sends them only where they
            are others.
        before: values of the round before for all parts, by their keys; updates of them are then taken as well.
        ahead: what the round should have of some boxes besides; what is returned of them is in this memory.
        out: memory for the rest, by the parts' keys: fp32 tensors of the parts' shapes.

    Raises:
        UserError: the server refuses, or is away for too long.
    """
    ahead = ahead or Taken()
    own = by_place(parts, expected)
    # What a round has left as it was may have been sent ahead nevertheless, in a contribution that did not count.
    known = {**ahead.values, **own}
    places = dict.fromkeys((part.spec.name, part.box) for part in parts)
    values = dict(ahead.values)
    memory = by_place(parts, out)
    values |= {
        place: memory[place] if place in memory else torch.empty(place[1].shape)
        for place in places
        if place not in values
    }
    base = {(part.spec.name, part.box): before[part.key] for part in parts} if before else {}

    def take(connection: Connection, share: list[Place]) -> None:
        expected = {
            place: _digest(own[place]) if place in own else ahead.sources[place] for place in share if place in known
        }
        incoming = Incoming(share, base, values)
        count = 0

        def once() -> None:
            places = list(incoming.left)
            slices = [
                pb2.Slice(
                    name=name,
                    start=box.start,
                    shape=box.shape,
                    expected=expected.get((name, box), b""),
                    skip=incoming.arrived((name, box)),
                )
                for name, box in places
            ]
            request = pb2.DownloadRequest(
                caller=caller, round=number, slices=slices, since=number - 1 if base else None
            )
            _receive(connection, request, together, places, incoming, known)

        def advanced() -> bool:
            nonlocal count
            before, count = count, incoming.count
            return before < count

        connection.again("Download", once, advanced, together)

    together = Streams(pool)
    shares = [
        _shares([place for place in values if route.leads(at, place[0])], streams)
        for at in range(len(route.connections))
    ]
    together.run(route, shares, take)
    return {part.key: values[part.spec.name, part.box] for part in parts}


def _shares(places: list[Place], streams: int) -> list[list[Place]]:
    """Return places in up to `streams` shares of about the same size."""
    shares: list[list[Place]] = [[] for _ in range(streams)]
    sizes = [0] * streams
    for place in sorted(places, key=lambda place: -place[1].numel):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(place)
        sizes[smallest] += place[1].numel
    return [share for share in shares if share]


def _receive(
    connection: Connection,
    request: Any,
    together: Streams,
    places: Sequence[Place],
    incoming: Incoming,
    known: Mapping[Place, torch.Tensor],
) -> None:
    """Take what one stream brings: frames, or the word that boxes are as expected."""
    for batch in connection.stream("Download", request, together):
        for index in batch.unchanged:
            if index >= len(places) or places[index] not in known:
                raise DamagedOnTheWay(f"slice {index} is said to be as expected, and was not")
            incoming.take_as(places[index], known[places[index]])
        for frame in batch.frames:
            connection.count(received=len(frame.payload))
            incoming.take(frame)
    if incoming.left:
        raise DamagedOnTheWay("the download ended too early")


def _digest(values: torch.Tensor) -> bytes:
    return hashlib.sha256(memoryview(values.detach().contiguous().view(-1).numpy()).cast("B")).digest()
