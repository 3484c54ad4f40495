# SPDX-License-Identifier: Apache-2.0
"""One line of progress on standard error: rewritten in place on a terminal, now and then in a log file."""

from __future__ import annotations

import time
from typing import TextIO

__all__ = ["PrepareProgress", "megabytes"]

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 10.0
_BAR_WIDTH = 24


class PrepareProgress:
    """Shows how much of a known number of bytes is done."""

    def __init__(
        self, label: str, total_bytes: int, stream: TextIO, *, log_seconds: float = _LOG_SECONDS
    ) -> None:
        """Start the clock.

        Args:
            label: The activity, put in front of the line.
            total_bytes: Bytes that make 100 percent.
            stream: Where to write.
            log_seconds: Seconds between two lines where `stream` is not a terminal.
        """
        self._label = label
        self._total = max(total_bytes, 1)
        self._stream = stream
        self._terminal = stream.isatty()
        self._interval = _TERMINAL_SECONDS if self._terminal else log_seconds
        self._start = self._last = time.monotonic()
        self._done = 0
        self._documents = 0

    def advance(self, done_bytes: int, documents: int) -> None:
        """Add finished work; writes only when the interval has passed."""
        self._done += done_bytes
        self._documents += documents
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            self._write(now)

    def close(self) -> None:
        """Erase the line on a terminal, so that what follows starts on a clean one."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _write(self, now: float) -> None:
        share = min(self._done / self._total, 1.0)
        speed = self._done / max(now - self._start, 1e-9)
        text = (
            f"{self._label} {100 * share:3.0f}% {megabytes(self._done)} of {megabytes(self._total)}, "
            f"{self._documents:,} documents, {megabytes(speed)}/s"
        )
        if self._terminal:
            filled = round(share * _BAR_WIDTH)
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            self._stream.write(f"\r\x1b[K[{bar}] {text}")
        else:
            self._stream.write(text + "\n")
        self._stream.flush()


def megabytes(count: float) -> str:
    """Return a number of bytes in MB (10**6 bytes) with one decimal."""
    return f"{count / 1e6:,.1f} MB"
