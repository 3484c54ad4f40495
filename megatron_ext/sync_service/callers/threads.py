# SPDX-License-Identifier: Apache-2.0
"""Threads that callers share: no caller has more than half of them at a time, so that another one's turn comes soon."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["Threads"]


@dataclass(eq=False)
class _Job:
    """What is to be done in a thread."""

    work: Callable[[], Any]
    done: asyncio.Future[Any]


class Threads:
    """A pool of threads. For one event loop.

    What a caller asks for beyond its share waits outside of the pool, where it holds no thread and is in no other
    caller's way. A call that is cancelled has its share until its work has ended: no thread can be interrupted.
    """

    def __init__(self, count: int, name: str) -> None:
        """Take how many threads there are at most, and how they are called."""
        self._share = max(1, count // 2)
        self._pool = ThreadPoolExecutor(count, name)
        self._running: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, dict[_Job, None]] = {}  # the longest waiting one first

    async def run[T](self, whose: Hashable, work: Callable[[], T]) -> T:
        """Return what a function returns in a thread, once the caller's share leaves one."""
        job = self._submit(whose, work)
        try:
            found: T = await job.done
            return found
        except asyncio.CancelledError:
            # What has not begun is forgotten, with the message that it would have worked on.
            waiting = self._waiting.get(whose, {})
            waiting.pop(job, None)
            if not waiting:
                self._waiting.pop(whose, None)
            raise

    def begin(self, whose: Hashable, work: Callable[[], object]) -> None:
        """Call a function in a thread, once the caller's share leaves one, and wait for nothing."""
        self._submit(whose, work)

    def close(self) -> None:
        """Let the threads end, and forget what has not begun."""
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, whose: Hashable, work: Callable[[], Any]) -> _Job:
        job = _Job(work, asyncio.get_running_loop().create_future())
        if self._running[whose] < self._share:
            self._start(whose, job)
        else:
            self._waiting.setdefault(whose, {})[job] = None
        return job

    def _start(self, whose: Hashable, job: _Job) -> None:
        self._running[whose] += 1
        loop = job.done.get_loop()

        def do() -> None:
            found, error = None, None
            if not job.done.cancelled():
                try:
                    found = job.work()
                except BaseException as raised:  # the caller that waits for it gets it
                    error = raised
            # One call: each wakes the loop through a socket, which costs about as much as a small message.
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._ended, whose, job, found, error)

        self._pool.submit(do)

    def _ended(self, whose: Hashable, job: _Job, found: Any, error: BaseException | None) -> None:
        """Say how a job has ended, and let the next one of its caller begin."""
        if not job.done.cancelled():
            if error is None:
                job.done.set_result(found)
            else:
                job.done.set_exception(error)
        self._running[whose] -= 1
        waiting = self._waiting.get(whose)
        if waiting:
            following = next(iter(waiting))
            del waiting[following]
            self._start(whose, following)
        if not waiting:
            self._waiting.pop(whose, None)
        if not self._running[whose]:
            del self._running[whose]
