# SPDX-License-Identifier: Apache-2.0
"""What the driver does to a process from outside, through a small file that both map: its calendar, and its disk."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Strain", "install"]

_FORM = struct.Struct("<dd")


class Strain:
    """The driver's side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(_FORM.pack(0.0, 0.0))
        self._offset, self._pause = 0.0, 0.0

    def jump(self, seconds: float) -> None:
        """Let the clock of the calendar jump; it stays there."""
        self._offset += seconds
        self._write()

    def slow_disk(self, seconds: float) -> None:
        """Let every flush to the disk take so much longer."""
        self._pause = seconds
        self._write()

    def _write(self) -> None:
        with self.path.open("r+b") as file:
            file.write(_FORM.pack(self._offset, self._pause))


class _Calendar:
    """The module `time` with another calendar.

    For the product alone: gRPC adds a call's timeout to the calendar's time in Python, and compares the sum in C with a
    clock that does not jump here. On a machine whose clock does, both do.
    """

    def __init__(self, shared: mmap.mmap) -> None:
        self._shared = shared

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        """Return what a calendar that has jumped says."""
        return time.time() + _FORM.unpack_from(self._shared)[0]


def install(path: str) -> None:
    """Let this process have the clock and the disk that the file says."""
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), _FORM.size)
    calendar = _Calendar(shared)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_ext.") and getattr(module, "time", None) is time:
            module.time = calendar
    os.fsync = _slowed(os.fsync, shared)
    os.fdatasync = _slowed(os.fdatasync, shared)


def _slowed(flush: Callable[[int], None], shared: mmap.mmap) -> Callable[[int], None]:
    def slowed(handle: int) -> None:
        time.sleep(_FORM.unpack_from(shared)[1])
        flush(handle)

    return slowed
