# SPDX-License-Identifier: Apache-2.0
"""The journal of a run: one line of JSON per event, each with a checksum. A server only appends to it.

It is both what a restarted server resumes from and the history for people. An event has happened once its line is on
the disk.
"""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.durable import sync_path
from megatron_ext.sync_service.rounds.server_commands import recover_command

__all__ = [
    "Event",
    "Journal",
    "JournalContent",
    "line_of",
    "parse_journal",
    "read_journal",
    "read_whole_journal",
    "restore_or_rebuild",
]

Event = dict[str, Any]
"""`event` is what happened, `time` when (seconds since 1970); the other keys depend on it."""


@dataclass(frozen=True, kw_only=True)
class JournalContent:
    """What a journal says."""

    events: tuple[Event, ...]
    """Of its whole lines, up to the first that is damaged."""

    whole: bytes
    """These lines. What follows is one that was cut off, or begins with a damaged one."""

    damage: str = ""
    """Which line is damaged, in words; empty when none is."""

    @property
    def newest(self) -> int:
        """The newest round that is committed; -1 for none."""
        committed = self._last("committed")
        return -1 if committed is None else int(committed["round"])

    @property
    def newest_digest(self) -> str:
        """Of the values of that round; empty for none."""
        committed = self._last("committed")
        return "" if committed is None else str(committed["digest"])


    @property
    def rebuilt_at(self) -> int:
        """The round at which it was rebuilt the last time; -1 if it never was."""
        rebuilt = self._last("recovered")
        return -1 if rebuilt is None else int(rebuilt["round"])

    @property
    def grown(self) -> int:
        """How many bytes of the whole lines come after the newest round."""
        lines = self.whole.splitlines(keepends=True)
        ends = (at for at, event in enumerate(self.events, 1) if event["event"] in ("committed", "recovered"))
        return sum(map(len, lines[max(ends, default=0) :]))

    @property
    def counting(self) -> tuple[Event, ...]:
        """The events that lead to the state of the run: of a rebuilt journal those before say nothing about it."""
        begins = [index for index, event in enumerate(self.events) if event["event"] == "recovered"]
        return self.events[begins[-1] if begins else 0 :]

    def _last(self, kind: str) -> Event | None:
        return next((event for event in reversed(self.events) if event["event"] == kind), None)


def read_journal(path: Path) -> JournalContent:
    """Read a journal, which may be missing. Nothing is changed.

    Raises:
        OSError: it is there and cannot be read.
    """
    return parse_journal(path.read_bytes() if path.exists() else b"")


def read_whole_journal(path: Path) -> JournalContent:
    """Read a journal, which may be missing, to resume from it. Nothing is changed.

    Raises:
        OSError: it is there and cannot be read.
        UserError: a whole line is damaged.
    """
    content = read_journal(path)
    if content.damage:
        raise UserError(
            f"{path}: {content.damage}; {restore_or_rebuild(path.parent)}, or move the run's folder away to start from "
            "scratch"
        )
    return content


def parse_journal(data: bytes) -> JournalContent:
    """Return what the bytes of a journal say."""
    lines = data.splitlines(keepends=True)
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        event = _parse(line)
        # What a crash cuts off has no end, or holes of zeros: any other damaged line has happened.
        is_torn = number == len(lines) and (not line.endswith(b"\n") or b"\0" in line)
        if event is None:
            damage = "" if is_torn else f"line {number} is damaged (of {len(lines)})"
            return JournalContent(events=tuple(events), whole=b"".join(lines[: number - 1]), damage=damage)
        events.append(event)
    return JournalContent(events=tuple(events), whole=b"".join(lines))


class Journal:
    """The file, open for appending. Not for several threads at once."""

    def __init__(
        self,
        path: Path,
        copy: Callable[[bytes], None] | None = None,
        content: JournalContent | None = None,
    ) -> None:
        """Open or create the file, and read what is there into `events`.

        Args:
            path: of the file.
            copy: is given every line that is appended, which has happened when that returns; it may raise OSError.
            content: of the file, if it was read before as a whole.

        A last line that is not whole is cut off: the server died while it wrote it, so nobody was told of it.

        Raises:
            UserError: a whole line is damaged.
        """
        content = content or read_whole_journal(path)
        self.path = path
        self._copy = copy
        self.events = list(content.events)
        self._size, self._crc = len(content.whole), zlib.crc32(content.whole)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(self._size)
        sync_path(path.parent)

    @property
    def position(self) -> tuple[int, int]:
        """The bytes of all lines, and their CRC-32."""
        return self._size, self._crc

    def append(self, event: Event) -> Event:
        """Write an event; it is on the disk when this returns.

        Returns:
            The event with its time.

        Raises:
            OSError: it could not be written; the file is as it was.
        """
        event, line = line_of(event)
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
        self._size, self._crc = self._size + len(line), zlib.crc32(line, self._crc)
        return event

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def line_of(event: Event, at: float | None = None) -> tuple[Event, bytes]:
    """Return an event with its time, in seconds since 1970 and now unless told otherwise, and its line."""
    event = {**event, "time": round(time.time(), 3) if at is None else at}
    body = json.dumps(event)
    return event, f'{{"crc": "{zlib.crc32(body.encode()):08x}", {body[1:]}\n'.encode()


def restore_or_rebuild(folder: Path) -> str:
    """Return how people get back what the journal in a run's folder has lost, which "it" is in messages."""
    return f"restore it from a copy, or rebuild it from the newest snapshot with: {recover_command(folder)}"


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
