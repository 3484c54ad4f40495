# SPDX-License-Identifier: Apache-2.0
"""Letting the kernel write a file to the disk while it is still being made, so that fsync has less to wait for."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["Writeback"]

_EVERY_BYTES = 128 << 20
_SYNC_FILE_RANGE_WRITE = 2


class Writeback:
    """Begins to write out what was written, now and then. Promises nothing: what is to be durable needs fsync."""

    def __init__(self) -> None:
        self._waiting = 0

    def wrote(self, handle: int, nbytes: int) -> None:
        """Count what was written; threads may lose count, which only changes when it begins."""
        self._waiting += nbytes
        if self._waiting >= _EVERY_BYTES:
            self._waiting = 0
            begin = _sync_file_range()
            if begin is not None:
                # Where it fails, fsync fails as well, and says why.
                begin(handle, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Any:
    """Return the system call, which waits for nothing and takes no error from fsync; None where there is none."""
    return getattr(ctypes.CDLL(None), "sync_file_range", None)
