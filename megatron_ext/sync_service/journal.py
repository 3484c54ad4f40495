# SPDX-License-Identifier: Apache-2.0
"""The journal of a run: one line of JSON per event, each with a checksum, only ever appended to.

It is both what a restarted server goes on from and the history for people. An event has happened once its line is on
the disk.
"""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.durable import sync_path

__all__ = ["Event", "Journal"]

Event = dict[str, Any]
"""`event` is what happened, `time` when (seconds since 1970); the other keys depend on it."""


class Journal:
    """The file, open for appending. Not for several threads at once."""

    def __init__(self, path: Path, copy: Callable[[bytes], None] | None = None) -> None:
        """Open or create the file, and read what is there into `events`.

        Args:
            path: of the file.
            copy: is given every line that is appended, which has happened when that returns; it may raise OSError.

        A last line that is not whole is cut off: the server died while it wrote it, so nobody was told of it.

        Raises:
            UserError: a whole line is damaged.
        """
        self.path = path
        self._copy = copy
        self.events: list[Event] = []
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        self._size = 0
        lines = self._file.read().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            event = _parse(line)
            # What a crash cuts off has no end, or holes of zeros: any other damaged line has happened.
            is_torn = number == len(lines) and (not line.endswith(b"\n") or b"\0" in line)
            if event is None and not is_torn:
                raise UserError(
                    f"{path}: line {number} is damaged (of {len(lines)}); restore the file from a copy, or move the "
                    "run's folder away to start it anew"
                )
            if event is not None:
                self.events.append(event)
                self._size += len(line)
        self._file.truncate(self._size)
        sync_path(path.parent)

    def append(self, event: Event) -> Event:
        """Write an event; it is on the disk when this returns.

        Returns:
            The event with its time.

        Raises:
            OSError: it could not be written; the file is as it was.
        """
        event = {**event, "time": round(time.time(), 3)}
        body = json.dumps(event)
        line = f'{{"crc": "{zlib.crc32(body.encode()):08x}", {body[1:]}\n'.encode()
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, "the disk is full", str(self.path))
            os.fsync(self._file.fileno())
            if self._copy is not None:
                self._copy(line)
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(line)
        return event

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _parse(line: bytes) -> Event | None:
    """Return the event of a line, None when the line is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line)
        crc = event.pop("crc")
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return event if f"{zlib.crc32(json.dumps(event).encode()):08x}" == crc else None
