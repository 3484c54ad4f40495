# SPDX-License-Identifier: Apache-2.0
"""Taking the values of a committed round from the server, in parallel streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.connection import Connection, DamagedOnTheWay
from megatron_ext.sync_service.frames import Frame, whole_box
from megatron_ext.sync_service.protocol import pb2
from megatron_ext.sync_service.refusal import Refusal

__all__ = ["download"]


def download(
    connection: Connection, pool: ThreadPoolExecutor, caller: Any, catalog: Catalog, number: int, streams: int
) -> dict[str, torch.Tensor]:
    """Return all values of a round.

    Args:
        connection: to the server.
        pool: has a thread per stream.
        caller: the peer, as a message of the protocol.
        catalog: the tensors.
        number: the round.
        streams: how many parts of about the same size are taken at once.

    Raises:
        UserError: the server refuses, or is away for too long.
    """
    values = {spec.name: torch.empty(spec.shape) for spec in catalog}
    parts: list[list[TensorSpec]] = [[] for _ in range(streams)]
    sizes = [0] * streams
    for spec in sorted(catalog, key=lambda spec: -spec.numel):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(spec)
        sizes[smallest] += spec.numel

    def take(specs: list[TensorSpec]) -> None:
        slices = [pb2.Slice(name=spec.name) for spec in specs]
        request = pb2.DownloadRequest(caller=caller, round=number, slices=slices)
        connection.again("Download", lambda: _receive(connection, request, specs, values))

    list(pool.map(take, [part for part in parts if part]))
    return values


def _receive(connection: Connection, request: Any, specs: list[TensorSpec], values: dict[str, torch.Tensor]) -> None:
    """Fill the values of tensors with what one stream brings."""
    boxes = {spec.name: whole_box(spec.shape) for spec in specs}
    arrived = dict.fromkeys(boxes, 0)
    for batch in connection.stream("Download", request):
        for message in batch.frames:
            frame = _checked(message)
            if boxes.get(frame.name) != frame.box or frame.offset != arrived[frame.name]:
                raise DamagedOnTheWay(f"a frame that was not asked for: {frame.place}")
            values[frame.name].view(-1)[frame.offset : frame.offset + frame.count] = frame.values()
            arrived[frame.name] += frame.count
    if any(count != boxes[name].numel for name, count in arrived.items()):
        raise DamagedOnTheWay("the download ended too early")


def _checked(message: Any) -> Frame:
    frame = Frame.from_message(message)
    try:
        frame.check()
    except Refusal as refusal:
        raise DamagedOnTheWay(str(refusal)) from refusal
    return frame
