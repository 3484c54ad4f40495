# SPDX-License-Identifier: Apache-2.0
"""One channel to a server: its calls, their last progress, and what ends one that stalls."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from megatron_ext.sync_service.protocol.protocol import grpc
from megatron_ext.sync_service.protocol.wire import calls_of

__all__ = ["Line", "Stalled", "Watch"]


class Stalled(Exception):
    """Nothing has come for too long, or never will."""


class Line:
    """A channel.

    Attributes:
        last: when any of its calls last made progress.
        calls: how many share it.
        is_closed: whether there can be no further one.
    """

    def __init__(self, channel: Any) -> None:
        """Take a channel."""
        self.last = -math.inf
        self.calls = 0
        self.is_closed = False
        self._channel = channel
        self._calls = calls_of(channel)
        self._lock = threading.Lock()
        self._is_given_up = False

    def start(self, method: str, *arguments: Any, future: bool = False, **options: Any) -> Any:
        """Return what a method of the protocol returns.

        Raises:
            Stalled: another thread has closed the channel.
        """
        called = self._calls[method]
        try:
            return (called.future if future else called)(*arguments, **options)
        except ValueError as error:
            if not self.is_closed:
                raise
            raise Stalled("its connection was closed") from error

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a call as long as it lasts."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def progressed(self) -> None:
        """Note that a call has just made progress."""
        self.last = time.monotonic()

    def give_up(self) -> None:
        """Close the channel once it has no calls any more; those that it has may end by themselves."""
        self._is_given_up = True
        self._count(0)

    def close(self) -> None:
        """End all calls."""
        self.is_closed = True
        self._channel.close()

    def _count(self, change: int) -> None:
        with self._lock:
            self.calls += change
            is_over = self._is_given_up and self.calls == 0
        if is_over:
            self.close()


class Watch:
    """Cancels a call after some seconds of silence on its line, times the calls that share it.

    A line serves all streams in turn, so that the messages of all of them may come to their end at about the same time.
    A deadline of gRPC would end a long stream that moves well, and its keepalive asks only the next hop, which may be a
    proxy that answers for a server that does not.
    """

    def __init__(self, line: Line, call: Any, seconds: float, what: str) -> None:
        """Take a call that was just started; `what` says what has not happened to messages if it stalls."""
        self._line = line
        self._call = call
        self._seconds = seconds
        self._what = what
        self._begin = time.monotonic()
        self._ended = threading.Event()
        self._stalled = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._ended.set()
        self._call.cancel()
        if self._stalled and isinstance(error, grpc.RpcError | grpc.FutureCancelledError):
            raise Stalled(f"nothing has {self._what} for {self._seconds:g} s and more") from error
        if isinstance(error, grpc.FutureCancelledError):
            raise Stalled("it was cancelled") from error

    def _watch(self) -> None:
        left = self._seconds
        while not self._ended.wait(max(left, 0.01)):
            left = max(self._line.last, self._begin) + self._seconds * self._line.calls - time.monotonic()
            if left < 0:
                self._stalled = True
                self._call.cancel()
                return
