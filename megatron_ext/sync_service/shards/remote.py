# SPDX-License-Identifier: Apache-2.0
"""A copy of a run's durable state at a URL, through fsspec: another machine can resume from it.

    URL/RUN/owner.json                           which server writes there
    URL/RUN/journal/part-N.jsonl                 the lines of the journal, a number of them in each part
    URL/RUN/snapshots/round-N.safetensors        the values of the newest rounds

The server works in its folder. An event has happened once its line is in both places; the snapshot of a round is there
before the line that commits it. Contributions to the open round are not copied: their peers send them again.

The last server that started with a URL owns it. Another one that still runs finds out before and after everything that
it writes, and nothing that it does counts any more.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.durable import replace_file
from megatron_ext.sync_service.disk.snapshot_names import newest_of, snapshot_name
from megatron_ext.sync_service.rounds.evidence import check_lines
from megatron_ext.sync_service.rounds.journal import parse_journal
from megatron_ext.sync_service.rounds.server_commands import recover_command
from megatron_ext.sync_service.shards.remote_folder import RemoteFolder

__all__ = ["LINES", "RemoteState"]

log = logging.getLogger(__name__)

LINES = 500
"""Of the journal in a part: object stores cannot append, so the last part is rewritten with every line."""


class RemoteState(RemoteFolder):
    """The copy of one run. Not for several threads at once, except that a snapshot may be put at any time."""

    def __init__(self, url: str, run: str) -> None:
        """Find what is there.

        Args:
            url: such as s3://bucket/folder.
            run: the run id.

        Raises:
            UserError: fsspec or what it needs for this kind of URL is not installed, or the place cannot be used.
        """
        super().__init__(url, run, holding=("journal", "snapshots"))
        self._run = run
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
        here = _without_undone(_whole_lines(here), self.journal)
        # Who has no business here must not drive away who has.
        self._compare(here, folder)
        self._check_snapshots(here, folder)
        self._own()
        self._parts = self._read_parts()
        there = self.journal
        here = _without_undone(here, there)
        self._compare(here, folder)
        if here.startswith(there):
            for line in here[len(there) :].splitlines(keepends=True):
                self._parts = _extended(self._parts, line)
            for number in range(there.count(b"\n") // LINES, len(self._parts)):
                self._put_part(number, self._parts[number])
            self._put_missing(folder / "snapshots")
            return
        log.info("run in %s resumes from %s", folder, self.url)
        # What was uploaded there has been overtaken.
        shutil.rmtree(folder / "spool", ignore_errors=True)
        (folder / "snapshots").mkdir(parents=True, exist_ok=True)
        self.get_snapshots(folder / "snapshots")
        replace_file(path, there)

    def _compare(self, here: bytes, folder: Path) -> None:
        """Refuse a journal that is not the beginning of the copy's, nor the other way round."""
        there = self.journal
        if not (here.startswith(there) or there.startswith(here)):
            raise UserError(
                f"state {self.url}: has another history than {folder}: two servers have used it, or another run of "
                "that name; give another URL, or move that folder away to resume from the URL"
            )

    def _check_snapshots(self, here: bytes, folder: Path) -> None:
        """Refuse a copy or a folder whose journals have lost rounds that there are snapshots of, by `evidence`."""
        journal = parse_journal(max(here, self.journal, key=len))
        if journal.damage:
            return  # which is said when the journal is read
        found, newest = newest_of(self._snapshot_sizes()), journal.newest
        # A snapshot is there before its round is committed.
        if found > newest + 1:
            raise UserError(
                f"state {self.url}: has the snapshot {snapshot_name(found)}, but the newest round of its journal is "
                f"{'none' if newest < 0 else newest}: the journal there has lost lines; restore it from a copy, start "
                f"the server with the folder that has them, give another URL, or rebuild it from the newest snapshot "
                f"with: {recover_command(folder, self.url)}"
            )
        check_lines(self._run, folder, journal.whole, newest)

    @property
    def journal(self) -> bytes:
        """What the journal there says."""
        return b"".join(self._parts)

    def replace_journal(self, content: bytes) -> str:
        """Own the copy, and put another journal in the place of that which is there.

        Returns:
            The name of the folder next to it in which the former one is kept; empty when there was none.

        Raises:
            OSError: it could not be written.
        """
        self._own()
        kept = ""
        with self._writing():
            parts = self._listed("journal")
            if parts:
                kept = f"journal.lost-{uuid.uuid4().hex[:8]}"
                self._files.makedirs(f"{self._root}/{kept}")
            # The last one first: whatever ends this, what is left is the beginning of a journal.
            for path in reversed(parts):
                self._files.mv(path, f"{self._root}/{kept}/{path.rpartition('/')[2]}")
        self._parts = []
        for line in content.splitlines(keepends=True):
            self._parts = _extended(self._parts, line)
        for number, part in enumerate(self._parts):
            self._put_part(number, part)
        return kept

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
            parts = [self._files.cat_file(path) for path in self._listed("journal")]
        cut_off = sum(map(len, parts)) - len(_whole_lines(b"".join(parts)))
        return parts if cut_off == 0 else [*parts[:-1], parts[-1][:-cut_off]]


def _whole_lines(journal: bytes) -> bytes:
    """Return a journal without a last line that was cut off, which has not happened."""
    content = parse_journal(journal)
    return journal[: journal.rfind(b"\n") + 1] if content.damage else content.whole


def _without_undone(here: bytes, there: bytes) -> bytes:
    """Return a journal without its last line, if the copy differs from there on.

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
