# SPDX-License-Identifier: Apache-2.0
"""Taking the values of a committed round from the server, in parallel streams."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import torch

from megatron_ext.sync_service.connection import Connection, DamagedOnTheWay
from megatron_ext.sync_service.frames import Box, Frame
from megatron_ext.sync_service.parts import Part, Values
from megatron_ext.sync_service.protocol import pb2
from megatron_ext.sync_service.refusal import Refusal
from megatron_ext.sync_service.route import Route

__all__ = ["download"]

_Place = tuple[str, Box]
"""A tensor's name and a box of it."""


def download(
    route: Route,
    pool: ThreadPoolExecutor,
    caller: Any,
    parts: Sequence[Part],
    number: int,
    streams: int,
    expected: Values | None = None,
    before: Values | None = None,
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

    Raises:
        UserError: the server refuses, or is away for too long.
    """
    values = {(part.spec.name, part.box): torch.empty(part.box.shape) for part in parts}
    base = {(part.spec.name, part.box): before[part.key] for part in parts} if before else {}
    known = {(part.spec.name, part.box): expected[part.key] for part in parts if expected and part.key in expected}

    def take(connection: Connection, share: list[_Place]) -> None:
        slices = {}
        for name, box in share:
            expected = _digest(known.get((name, box)))
            slices[name, box] = pb2.Slice(name=name, start=box.start, shape=box.shape, expected=expected)
        since = number - 1 if base else None
        wanted = {place: values[place] for place in share}
        left = len(wanted)

        def once() -> None:
            rest = [slices[place] for place in wanted]
            request = pb2.DownloadRequest(caller=caller, round=number, slices=rest, since=since)
            _receive(connection, request, wanted, known, base)

        def advanced() -> bool:
            nonlocal left
            before, left = left, len(wanted)
            return left < before

        connection.again("Download", once, advanced)

    by_server = [
        [(connection, share) for share in _shares([place for place in values if route.leads(at, place[0])], streams)]
        for at, connection in enumerate(route.connections)
    ]
    # All servers have something to do all the time.
    turns = [entry for turn in zip_longest(*by_server) for entry in turn if entry is not None]
    list(pool.map(lambda turn: take(*turn), turns))
    return {part.key: values[part.spec.name, part.box] for part in parts}


def _shares(places: list[_Place], streams: int) -> list[list[_Place]]:
    """Return places in up to so many shares of about the same size."""
    shares: list[list[_Place]] = [[] for _ in range(streams)]
    sizes = [0] * streams
    for place in sorted(places, key=lambda place: -place[1].numel):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(place)
        sizes[smallest] += place[1].numel
    return [share for share in shares if share]


def _receive(
    connection: Connection,
    request: Any,
    values: dict[_Place, torch.Tensor],
    known: Mapping[_Place, torch.Tensor],
    base: Mapping[_Place, torch.Tensor],
) -> None:
    """Fill boxes with what one stream brings, adds to values of the round before, or says to be as expected.

    A box that is whole is taken out of `values`: it is not asked for again when the stream fails later.
    """
    arrived = dict.fromkeys(values, 0)
    places = list(values)
    for batch in connection.stream("Download", request):
        for index in batch.unchanged:
            if index >= len(places) or places[index] not in known:
                raise DamagedOnTheWay(f"slice {index} is said to be as expected, and was not")
            if places[index] in values:
                values.pop(places[index]).copy_(known[places[index]].view(places[index][1].shape))
        for message in batch.frames:
            frame = _checked(message)
            connection.count(received=len(frame.payload))
            place = (frame.name, frame.box)
            if place not in values or frame.offset != arrived[place]:
                raise DamagedOnTheWay(f"a frame that was not asked for: {frame.place}")
            at = slice(frame.offset, frame.offset + frame.count)
            if frame.codec == "fp32":
                frame.decode_into(values[place].view(-1)[at])
            elif place in base:
                torch.add(base[place].view(-1)[at], frame.values(), out=values[place].view(-1)[at])
            else:
                raise DamagedOnTheWay(f"an update that was not asked for: {frame.place}")
            arrived[place] += frame.count
            if arrived[place] == values[place].numel():
                del values[place]
    if values:
        raise DamagedOnTheWay("the download ended too early")


def _digest(values: torch.Tensor | None) -> bytes:
    if values is None:
        return b""
    return hashlib.sha256(memoryview(values.detach().contiguous().view(-1).numpy()).cast("B")).digest()


def _checked(message: Any) -> Frame:
    frame = Frame.from_message(message)
    try:
        frame.check()
    except Refusal as refusal:
        raise DamagedOnTheWay(str(refusal)) from refusal
    return frame
