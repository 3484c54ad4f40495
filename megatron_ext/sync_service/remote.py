# SPDX-License-Identifier: Apache-2.0
"""A copy of a run's durable state at a URL, through fsspec: another machine can go on from it.

    URL/RUN/owner.json                           which server writes there
    URL/RUN/journal/part-N.jsonl                 the lines of the journal, so many in each part
    URL/RUN/snapshots/round-N.safetensors        the values of the newest rounds

The server works in its folder. An event has happened once its line is in both places; the snapshot of a round is there
before the line that commits it. Contributions to the open round are not copied: their peers send them again.

The last server that started with a URL owns it. Another one that still runs finds out before and after everything that
it writes, and nothing that it does counts any more.
"""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import suppress
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.sync_service.durable import replace_file
from megatron_ext.sync_service.remote_folder import RemoteFolder
from megatron_ext.sync_service.snapshot import snapshot_name

__all__ = ["LINES", "RemoteState"]

log = logging.getLogger(__name__)

LINES = 500
"""Of the journal in a part: object stores cannot append, so that the last part is written anew with every line."""


class RemoteState(RemoteFolder):
    """The copy of one run. Not for several threads at once, but that a snapshot may be put beside all else."""

    def __init__(self, url: str, run: str) -> None:
        """Find what is there.

        Args:
            url: such as s3://bucket/folder.
            run: the run id.

        Raises:
            UserError: fsspec or what it needs for this kind of URL is not installed, or the place cannot be used.
        """
        super().__init__(url, run, holding=("journal", "snapshots"))
        self._parts = self._read_parts()

    def meet(self, folder: Path) -> None:
        """Own the copy, and bring it and the server's folder to the same state, that of the one which has seen more.

        Args:
            folder: of the run.

        Raises:
            UserError: each has seen what the other has not, or one cannot be read.
            OSError: the copy cannot be written.
        """
        path = folder / "journal.jsonl"
        here = path.read_bytes() if path.exists() else b""
        # A line that was cut off has not happened.
        here = _without_undone(here[: here.rfind(b"\n") + 1], b"".join(self._parts))
        # Who has no business here must not drive away who has.
        self._compare(here, folder)
        self._check_snapshots(here)
        self._own()
        self._parts = self._read_parts()
        there = b"".join(self._parts)
        here = _without_undone(here, there)
        self._compare(here, folder)
        if here.startswith(there):
            for line in here[len(there) :].splitlines(keepends=True):
                self._parts = _extended(self._parts, line)
            for number in range(there.count(b"\n") // LINES, len(self._parts)):
                self._put_part(number, self._parts[number])
            self._put_missing(folder / "snapshots")
            return
        log.info("run in %s goes on from %s", folder, self._url)
        # What was uploaded there has been overtaken.
        shutil.rmtree(folder / "spool", ignore_errors=True)
        (folder / "snapshots").mkdir(parents=True, exist_ok=True)
        self._get_snapshots(folder / "snapshots")
        replace_file(path, there)

    def _compare(self, here: bytes, folder: Path) -> None:
        """Refuse a journal that is not the beginning of the copy's, nor the other way round."""
        there = b"".join(self._parts)
        if not (here.startswith(there) or there.startswith(here)):
            raise UserError(
                f"state {self._url}: has another history than {folder}: two servers have used it, or another run of "
                "that name; give another URL, or move that folder away to go on from the URL"
            )

    def _check_snapshots(self, here: bytes) -> None:
        """Refuse a copy whose journal has lost rounds that it has snapshots of, which would be deleted as unknown."""
        committed = [-1]
        for line in max(here, b"".join(self._parts), key=len).splitlines():
            with suppress(ValueError, TypeError, KeyError):  # a damaged line is named when the journal is read
                event = json.loads(line)
                if event["event"] == "committed":
                    committed.append(event["round"])
        # A snapshot is there before its round is committed.
        unknown = [name for name in self._snapshot_sizes() if name > snapshot_name(committed[-1] + 1)]
        if unknown:
            newest = "none" if committed[-1] < 0 else committed[-1]
            raise UserError(
                f"state {self._url}: has the snapshot {max(unknown)}, but the newest round of its journal is {newest}: "
                "the journal there has lost lines; restore it from a copy, start the server with the folder that has "
                "them, or give another URL"
            )

    def append(self, line: bytes) -> None:
        """Add a line.

        Raises:
            OSError: it could not be written, or another server owns the copy.
        """
        parts = _extended(self._parts, line)
        self._put_part(len(parts) - 1, parts[-1])
        self._parts = parts

    def _put_part(self, number: int, content: bytes) -> None:
        self._require_ownership()
        with self._writing():
            self._put_whole(f"{self._root}/journal/part-{number:08d}.jsonl", content)
        # Another server that has become the owner meanwhile may have read the copy without this.
        self._require_ownership()

    def _read_parts(self) -> list[bytes]:
        with self._reading():
            return [self._files.cat_file(path) for path in self._listed("journal")]


def _without_undone(here: bytes, there: bytes) -> bytes:
    """Return a journal without its last line, if the copy goes on otherwise from there.

    Only a line that is in both has happened. Where writing the copy fails, it may have been written nevertheless; a
    line of a later try is here alone, should the server end before that is written.
    """
    shorter = here[: here[:-1].rfind(b"\n") + 1]
    is_undone = bool(shorter) and not here.startswith(there) and not there.startswith(here)
    return shorter if is_undone and there.startswith(shorter) else here


def _extended(parts: list[bytes], line: bytes) -> list[bytes]:
    """Return the parts of a journal with one more line."""
    if not parts or parts[-1].count(b"\n") >= LINES:
        return [*parts, line]
    return [*parts[:-1], parts[-1] + line]
