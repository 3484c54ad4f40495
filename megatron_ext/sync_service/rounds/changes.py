# SPDX-License-Identifier: Apache-2.0
"""A condition that threads and coroutines wait for alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["Changes"]


class Changes(threading.Condition):
    """A condition whose `notify_all` wakes coroutines, too: these hold no thread while they wait.

    There may be a coroutine for each of a thousand peers, so what concerns no peer but the one that has caused it, such
    as its own contribution, wakes threads alone: `notify_threads`.
    """

    def __init__(self) -> None:
        """Let nobody wait yet."""
        super().__init__()
        self._guard = threading.Lock()
        self._wakers: set[Callable[[], object]] = set()

    def notify_threads(self) -> None:
        """Wake those that make rounds or wait for the end; to be called with the lock held."""
        super().notify_all()

    def notify_all(self) -> None:
        """Wake everybody; to be called with the lock held."""
        super().notify_all()
        with self._guard:
            wakers = tuple(self._wakers)
        for wake in wakers:
            wake()

    @contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        """Yield an event of the running loop that every change sets, for a coroutine that clears it before it looks."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile, and the coroutine with it
                loop.call_soon_threadsafe(changed.set)

        with self._guard:
            self._wakers.add(wake)
        try:
            yield changed
        finally:
            with self._guard:
                self._wakers.discard(wake)
