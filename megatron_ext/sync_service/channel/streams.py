# SPDX-License-Identifier: Apache-2.0
"""The streams of one upload or download, to all servers at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

from megatron_ext.sync_service.channel.connection import Connection
from megatron_ext.sync_service.channel.route import Route

__all__ = ["Streams"]

_Job = TypeVar("_Job")
_T = TypeVar("_T")


class Streams:
    """Jobs of which one that fails ends all: nothing reads or writes their memory any more when `run` is over."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        """Take the threads that work on the jobs, one each."""
        self._pool = pool
        self._lock = threading.Lock()
        self._calls: set[Any] = set()
        self._error: BaseException | None = None

    @property
    def is_ended(self) -> bool:
        """Whether a job has failed, so that the others are of no use."""
        return self._error is not None

    def run(self, route: Route, jobs: Sequence[Sequence[_Job]], work: Callable[[Connection, _Job], _T]) -> list[_T]:
        """Return what the jobs return.

        Args:
            route: to the servers.
            jobs: those of each connection of the route.
            work: does one; its calls are `held`.

        Raises:
            UserError: what the first one that failed has raised.
        """
        # All servers have something to do all the time.
        turns = [
            (connection, job)
            for turn in zip_longest(*jobs)
            for connection, job in zip(route.connections, turn, strict=True)
            if job is not None
        ]

        def one(turn: tuple[Connection, _Job]) -> _T:
            try:
                return work(*turn)
            except BaseException as error:  # Ctrl-C too: no other stream outlives it
                self._end(error)
                raise

        futures = [self._pool.submit(one, turn) for turn in turns]
        wait(futures)
        if self._error is not None:
            raise self._error
        return [future.result() for future in futures]

    @contextmanager
    def held(self, call: Any) -> Iterator[None]:
        """Cancel a call should a job fail meanwhile."""
        with self._lock:
            self._calls.add(call)
        if self.is_ended:
            call.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            calls = list(self._calls)
        for call in calls:
            call.cancel()
