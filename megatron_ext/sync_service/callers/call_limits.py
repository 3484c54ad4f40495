# SPDX-License-Identifier: Apache-2.0
"""What callers may hold at the server: calls that say nothing or wait, streams, bytes that are in flight.

A call costs no thread while it waits, but memory. Those that have not brought a message yet are few, of an address and
altogether, and end after some seconds. A caller that means it sends its message at once, so where there are too many,
the longest silent one makes room for it. An identified peer has streams and bytes of its own: one that asks
for too much delays only itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = ["Caller", "PeerLimits", "Places", "SilentCalls"]


class Caller(NamedTuple):
    """Who a call says that it is of. Everybody knows a peer's name, and only its own process the instance."""

    run: str
    peer: str
    instance: str

    @classmethod
    def of(cls, message: Any) -> Caller:
        """Return who a message of the protocol names."""
        return cls(message.run, message.peer, message.instance)

    @property
    def member(self) -> tuple[str, str]:
        """Its run and peer, whichever process speaks for that."""
        return self.run, self.peer


class SilentCalls:
    """Calls that have not brought a message yet. For one event loop."""

    def __init__(self, of_an_address: int, altogether: int) -> None:
        """Take how many there may be."""
        self._of_an_address = of_an_address
        self._altogether = altogether
        self._calls: dict[asyncio.Future[None], str] = {}  # the longest silent one first
        self._counts: Counter[str] = Counter()

    @contextmanager
    def waiting(self, address: str) -> Iterator[asyncio.Future[None]]:
        """Yield what is done once the call has to make room for a newer one.

        Args:
            address: of the caller, without its port.
        """
        if self._counts[address] >= self._of_an_address:
            self._end(next(call for call, found in self._calls.items() if found == address))
        elif len(self._calls) >= self._altogether:
            self._end(next(iter(self._calls)))
        call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[call] = address
        self._counts[address] += 1
        try:
            yield call
        finally:
            if call in self._calls:
                self._remove(call)

    def _end(self, call: asyncio.Future[None]) -> None:
        self._remove(call)
        call.set_result(None)

    def _remove(self, call: asyncio.Future[None]) -> None:
        address = self._calls.pop(call)
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


class Places:
    """Places of which one caller has some, and all together have no more than there are. For one event loop."""

    def __init__(self, of_one: int, altogether: float = math.inf) -> None:
        """Take how many there are."""
        self._of_one = of_one
        self._altogether = altogether
        self._counts: Counter[Hashable] = Counter()

    def of(self, key: Hashable) -> int:
        """Return how many a caller has."""
        return self._counts[key]

    @contextmanager
    def taken(self, key: Hashable, refusal: Refusal, count: int = 1) -> Iterator[None]:
        """Take places as long as this lasts.

        Args:
            key: of the caller.
            refusal: raised when there are not that many left.
            count: how many.

        Raises:
            Refusal: that one.
        """
        if self._counts[key] + count > self._of_one or self._counts.total() + count > self._altogether:
            raise refusal
        self._counts[key] += count
        try:
            yield
        finally:
            self._counts[key] -= count
            if not self._counts[key]:
                del self._counts[key]


class PeerLimits:
    """Streams and messages of every peer. For one event loop."""

    def __init__(self, streams: int, messages: int) -> None:
        """Take how many there may be.

        Args:
            streams: of a peer that are open: `peer_streams` of the configuration.
            messages: of a peer that are taken or sent at the same time; further ones wait for their turn.
        """
        self._limit = streams
        self._messages = messages
        self._streams = Places(streams)
        self._turns: dict[Hashable, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(self._messages))

    @contextmanager
    def stream(self, key: Hashable, who: str) -> Iterator[None]:
        """Count a stream as long as it is open.

        Args:
            key: of the peer.
            who: the peer in words.

        Raises:
            Refusal: the peer has as many as it may have.
        """
        refusal = Refusal(
            "full",
            f"{who} has {self._limit} streams open, as many as peer_streams of the server allows; use fewer "
            "streams or ranks, or raise peer_streams",
        )
        with self._streams.taken(key, refusal):
            try:
                yield
            finally:
                if self._streams.of(key) == 1:  # the last one
                    self._turns.pop(key, None)

    @asynccontextmanager
    async def message(self, key: Hashable) -> AsyncIterator[None]:
        """Wait until the peer's messages that are in flight leave room for another one, and count that."""
        async with self._turns[key]:
            yield
