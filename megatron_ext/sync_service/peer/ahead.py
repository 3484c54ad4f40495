# SPDX-License-Identifier: Apache-2.0
"""Taking what others have uploaded to the open round, while this peer still uploads and waits.

What alone one peer trains is known as soon as that one has sent it. It is in flight to the others from then on, instead
of starting with everything else when the round is committed. Nothing depends on it: the server is asked for the
round's values all the same, and told what they should be.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, DamagedOnTheWay
from megatron_ext.sync_service.channel.route import Route
from megatron_ext.sync_service.peer.incoming import Incoming, Place
from megatron_ext.sync_service.peer.parts import Part, Values, by_place
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.wire import Unreadable

__all__ = ["Ahead", "Taken"]

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
"""Seconds between two questions while there is something new."""

_LONGEST_PAUSE = 2.0
"""Seconds between two questions while there is not."""


@dataclass
class Taken:
    """What has arrived of a round that is not made yet."""

    values: dict[Place, torch.Tensor] = field(default_factory=dict)
    """Whole boxes, in memory of their own."""

    sources: dict[Place, bytes] = field(default_factory=dict)
    """Which contributions they are of."""


class Ahead:
    """What has been taken of a round that is not made yet. It asks, in threads of its own, until it is ended."""

    def __init__(
        self,
        route: Route,
        caller: Any,
        parts: Sequence[Part],
        number: int,
        index: int,
        before: Values | None = None,
        out: Values | None = None,
    ) -> None:
        """Begin to ask.

        Args:
            route: to the servers.
            caller: the peer, as a message of the protocol.
            parts: what this process holds.
            number: the round, above 0.
            index: of the peer.
            before: values of the round before for all parts, by their keys, where others send updates of them.
            out: memory for what is taken, by the parts' keys; fresh memory unless given.
        """
        self.number = number
        self._caller = caller
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._calls: set[Any] = set()
        self._taken = Taken()
        wanted = [part for part in parts if len(part.spec.owners) == 1 and part.spec.owners != (index,)]
        base = {(part.spec.name, part.box): before[part.key] for part in wanted} if before else {}
        self._memory = by_place(wanted, out)
        places = list(dict.fromkeys((part.spec.name, part.box) for part in wanted))
        self._threads = []
        for at, connection in enumerate(route.connections):
            here = [place for place in places if route.leads(at, place[0])]
            if here:
                arguments = (connection, here, base)
                self._threads.append(threading.Thread(target=self._work, args=arguments, name="ahead", daemon=True))
        for thread in self._threads:
            thread.start()

    def end(self) -> Taken:
        """Ask no more; return what has arrived as a whole."""
        with self._lock:
            self._ended.set()
            for call in self._calls:
                call.cancel()
        for thread in self._threads:
            thread.join()
        return self._taken

    def _work(self, connection: Connection, places: list[Place], base: dict[Place, torch.Tensor]) -> None:
        memory = {place: self._memory[place] for place in places if place in self._memory}
        incoming, sources = Incoming(places, base, memory, gradients=True), dict[Place, bytes]()
        pause = _FIRST_PAUSE
        while incoming.left and not self._ended.wait(pause):
            before = len(incoming.left)
            try:
                self._ask(connection, incoming, sources)
            except UserError:
                return  # the job ends, and nobody continues from the round
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE and not self._ended.is_set():
                    log.warning("nothing more is taken ahead of round %d: %s", self.number, error.details())
                    return
            except DamagedOnTheWay as error:
                log.warning("nothing more is taken ahead of round %d: %s", self.number, error)
                return
            is_new = len(incoming.left) < before
            pause = _FIRST_PAUSE if is_new else min(2 * pause, _LONGEST_PAUSE)
        with self._lock:
            self._taken.values.update(incoming.take_whole())
            self._taken.sources.update(sources)

    def _ask(self, connection: Connection, incoming: Incoming, sources: dict[Place, bytes]) -> None:
        """Take what is known of what is lacking."""
        slices = [pb2.Slice(name=name, start=box.start, shape=box.shape) for name, box in incoming.left]
        request = pb2.DownloadRequest(caller=self._caller, round=self.number, slices=slices, ahead=True)
        with self._lock:
            if self._ended.is_set():
                return
            call = connection.begin("Download", request)
            self._calls.add(call)
        incoming.begin_stream()
        try:
            for batch in call:
                if isinstance(batch, Unreadable):
                    raise DamagedOnTheWay(batch.problem)
                for frame in batch.frames:
                    incoming.take(frame)
                    sources[frame.name, frame.box] = batch.source
                    connection.count(received=len(frame.payload))
        finally:
            call.cancel()
            with self._lock:
                self._calls.discard(call)
