# SPDX-License-Identifier: Apache-2.0
"""Bringing what a process has of a contribution to the server, in parallel streams."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from megatron_ext.sync_service.channel.connection import Connection
from megatron_ext.sync_service.channel.route import Route
from megatron_ext.sync_service.channel.streams import Streams
from megatron_ext.sync_service.peer.outgoing import Outgoing, Piece
from megatron_ext.sync_service.peer.parts import Values
from megatron_ext.sync_service.protocol import wire

__all__ = ["upload"]


def upload(
    route: Route,
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
        route: to the servers.
        pool: has a thread per stream.
        caller: the peer, as a message of the protocol.
        outgoing: cuts the values into frames.
        number: the round.
        values: by the parts' keys.
        index: of the peer.
        call_bytes: bytes of a call: what is sent again when one fails, in calls of half as many at every try.

    Raises:
        UserError: the server refuses, or is away for too long, or the values have not the shapes of the parts.
    """
    outgoing.check(number, index, values)
    outgoing.begin(number, index)

    def send(connection: Connection, job: list[Piece]) -> bool:
        left, at_once, before, closed = job, len(job), len(job), False

        def requests(some: list[Piece]) -> Iterator[Any]:
            # Who calls comes first, alone: the server takes no values before it knows that.
            yield wire.Upload(caller=caller, round=number, frames=())
            for frames in outgoing.batches(number, some, values):
                connection.count(sent=sum(len(frame.payload) for frame in frames))
                yield wire.Upload(caller=caller, round=number, frames=frames)

        def once() -> bool:
            nonlocal left, at_once, closed
            size = at_once
            at_once = max(size // 2, 1)  # in case the link does not last for that many
            while left:
                closed |= bool(connection.send("Upload", requests(left[:size]), together).closed)
                left = left[size:]
            return closed

        def advanced() -> bool:
            nonlocal before
            earlier, before = before, len(left)
            return before < earlier

        return connection.again("Upload", once, advanced, together)

    together = Streams(pool)
    jobs = [
        list(outgoing.jobs(number, index, call_bytes, partial(route.leads, at))) for at in range(len(route.connections))
    ]
    return any(together.run(route, jobs, send))
