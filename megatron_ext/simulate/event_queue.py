# SPDX-License-Identifier: Apache-2.0
"""Events in the order of their times, and links that transfers share."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

__all__ = ["EventQueue", "SharedLink"]


class EventQueue:
    """What is going to happen.

    Attributes:
        now: the time of the event that happens, in seconds.
    """

    def __init__(self) -> None:
        """Begin at 0."""
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let something happen at a time; what is planned for the same time happens in the order of the plans."""
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), action))

    def step(self) -> bool:
        """Let the next event happen; return False where there is none."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True


class SharedLink:
    """A link that all transfers through it share equally, each of them no faster than its own end.

    All have the same rate at any time, so that one clock of bytes per transfer says when each is over.
    """

    def __init__(self, queue: EventQueue, capacity: float, each: float) -> None:
        """Take an idle link.

        Args:
            queue: of the simulation.
            capacity: of the link, in bytes per second.
            each: of one transfer at most, likewise.
        """
        self._queue, self._capacity, self._each = queue, capacity, each
        self._done = 0.0
        """Bytes that a transfer would have moved that began at the beginning."""
        self._since = 0.0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._cancelled: set[int] = set()
        self._version = 0

    @property
    def _active(self) -> int:
        return len(self._ends) - len(self._cancelled)

    def begin(self, nbytes: float, action: Callable[[], None]) -> int:
        """Begin a transfer, which `action` follows; return its number."""
        self._advance()
        number = next(self._numbers)
        heapq.heappush(self._ends, (self._done + nbytes, number, action))
        self._plan()
        return number

    def cancel(self, number: int) -> None:
        """End a transfer that is under way, which nothing follows."""
        self._advance()
        self._cancelled.add(number)
        self._plan()

    def _advance(self) -> None:
        if self._active:
            rate = min(self._each, self._capacity / self._active)
            self._done += rate * (self._queue.now - self._since)
        self._since = self._queue.now

    def _plan(self) -> None:
        """Wake up when the next transfer is over, should nothing change before."""
        while self._ends and self._ends[0][1] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._ends)[1])
        self._version += 1
        if self._ends:
            rate = min(self._each, self._capacity / self._active)
            version = self._version
            left = max(self._ends[0][0] - self._done, 0.0) / rate
            self._queue.at(self._queue.now + left, lambda: self._wake(version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return  # something has changed since
        self._advance()
        end, _, action = heapq.heappop(self._ends)
        self._done = max(self._done, end)
        self._plan()
        action()
