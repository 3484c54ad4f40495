# SPDX-License-Identifier: Apache-2.0
"""Taking the values of a committed round from the server, in parallel streams."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron_ext.sync_service.connection import Connection, DamagedOnTheWay
from megatron_ext.sync_service.frames import Box, Frame
from megatron_ext.sync_service.parts import Part
from megatron_ext.sync_service.protocol import pb2
from megatron_ext.sync_service.refusal import Refusal

__all__ = ["download"]

_Place = tuple[str, Box]
"""A tensor's name and a box of it."""


def download(
    connection: Connection, pool: ThreadPoolExecutor, caller: Any, parts: Sequence[Part], number: int, streams: int
) -> dict[str, torch.Tensor]:
    """Return the values that a round has for parts.

    Args:
        connection: to the server.
        pool: has a thread per stream.
        caller: the peer, as a message of the protocol.
        parts: what is wanted; parts with the same elements share the memory of their values.
        number: the round.
        streams: how many shares of about the same size are taken at once.

    Raises:
        UserError: the server refuses, or is away for too long.
    """
    values = {(part.spec.name, part.box): torch.empty(part.box.shape) for part in parts}
    shares: list[list[_Place]] = [[] for _ in range(streams)]
    sizes = [0] * streams
    for place in sorted(values, key=lambda place: -place[1].numel):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(place)
        sizes[smallest] += place[1].numel

    def take(share: list[_Place]) -> None:
        slices = [pb2.Slice(name=name, start=box.start, shape=box.shape) for name, box in share]
        request = pb2.DownloadRequest(caller=caller, round=number, slices=slices)
        connection.again("Download", lambda: _receive(connection, request, {place: values[place] for place in share}))

    list(pool.map(take, [share for share in shares if share]))
    return {part.key: values[part.spec.name, part.box] for part in parts}


def _receive(connection: Connection, request: Any, values: dict[_Place, torch.Tensor]) -> None:
    """Fill boxes with what one stream brings."""
    arrived = dict.fromkeys(values, 0)
    for batch in connection.stream("Download", request):
        for message in batch.frames:
            frame = _checked(message)
            place = (frame.name, frame.box)
            if place not in values or frame.offset != arrived[place]:
                raise DamagedOnTheWay(f"a frame that was not asked for: {frame.place}")
            values[place].view(-1)[frame.offset : frame.offset + frame.count] = frame.values()
            arrived[place] += frame.count
    if any(count != values[place].numel() for place, count in arrived.items()):
        raise DamagedOnTheWay("the download ended too early")


def _checked(message: Any) -> Frame:
    frame = Frame.from_message(message)
    try:
        frame.check()
    except Refusal as refusal:
        raise DamagedOnTheWay(str(refusal)) from refusal
    return frame
