# SPDX-License-Identifier: Apache-2.0
"""Bringing what a process has of a contribution to the server, in parallel streams."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_ext.sync_service.connection import Connection
from megatron_ext.sync_service.outgoing import Outgoing, Piece
from megatron_ext.sync_service.parts import Values
from megatron_ext.sync_service.protocol import pb2

__all__ = ["upload"]


def upload(
    connection: Connection,
    pool: ThreadPoolExecutor,
    caller: Any,
    outgoing: Outgoing,
    number: int,
    values: Values,
    *,
    index: int,
    call_bytes: int,
) -> bool:
    """Upload this process's share of a contribution, and return whether the round was closed before.

    Args:
        connection: to the server.
        pool: has a thread per stream.
        caller: the peer, as a message of the protocol.
        outgoing: cuts the values into frames.
        number: the round.
        values: by the parts' keys.
        index: of the peer.
        call_bytes: bytes of a call: what is sent again when one fails.

    Raises:
        UserError: the server refuses, or is away for too long, or the values have not the shapes of the parts.
    """
    outgoing.check(number, index, values)

    def send(job: list[Piece]) -> bool:
        def requests() -> Iterator[Any]:
            for frames in outgoing.batches(number, job, values):
                connection.count(sent=sum(len(frame.payload) for frame in frames))
                yield pb2.UploadRequest(caller=caller, round=number, frames=[frame.to_message() for frame in frames])

        return bool(connection.call("Upload", requests).closed)

    return any(pool.map(send, list(outgoing.jobs(number, index, call_bytes))))
