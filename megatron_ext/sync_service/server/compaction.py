# SPDX-License-Identifier: Apache-2.0
"""Dropping the lines of a journal that nothing needs any more: those before the newest rounds.

A journal only grows, and its lines of years ago are read at every start. In their place comes the state of the run
before the newest round, as that round's snapshot tells it; the line that commits the round and those after it stay as
they are, and so do the lines of some rounds before, for people. The server must not run meanwhile.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.durable import replace_file, sync_path
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.rounds.evidence import (
    has_its_beginning,
    newest_snapshot,
    of_another_run,
    whole_record,
)
from megatron_ext.sync_service.rounds.journal import JournalContent, line_of, read_whole_journal
from megatron_ext.sync_service.rounds.run_record import RunRecord
from megatron_ext.sync_service.server.recovery import JOURNAL, each_run, run_state_after
from megatron_ext.sync_service.shards.remote import RemoteState

__all__ = ["compact"]


def compact(folder: Path, *, run: str | None, url: str | None, rounds: int, dry_run: bool) -> Iterator[str]:
    """Shorten the journals of the runs in a folder; yields what was done, line by line.

    Args:
        folder: of a server that does not run, or of one of its runs.
        run: the run id, of that one alone; all runs when None.
        url: of the copy of the server's state (`state`), whose journal is shortened too; None without one.
        rounds: of how many of the newest rounds all lines stay; at least 1.
        dry_run: whether nothing is changed.

    Raises:
        UserError: a server uses the folder, or there is a run whose journal cannot be shortened; the others were.
    """
    if rounds < 1:
        raise UserError(f"--rounds is {rounds}; it must be 1 or more")
    yield from each_run(
        folder, run, url, "server compact", lambda path: _compact_run(path, url, rounds=rounds, dry_run=dry_run)
    )


def _compact_run(folder: Path, url: str | None, *, rounds: int, dry_run: bool) -> Iterator[str]:
    run, path = folder.name, folder / JOURNAL
    journal = read_whole_journal(path)
    record = _record_of(run, folder, journal)
    if record is None:
        yield f"run {run}: nothing to compact: no round was committed"
        return
    content = _compacted(journal, record, rounds)
    remote = None if url is None else RemoteState(url, run)
    if remote is not None and remote.journal != journal.whole and not content.startswith(remote.journal):
        raise UserError(
            f"run {run}: {folder} and state {url} have different histories; start and stop the server with both, which "
            "brings them to the same one"
        )
    if len(content) >= len(journal.whole):
        yield f"run {run}: nothing to compact: {len(journal.whole)} bytes, of at most {rounds} rounds"
        return
    _check_same_state(run, folder, journal.whole, content)
    would = "would be " if dry_run else ""
    kept = "" if dry_run else f"; the former one is kept as {_kept(path, journal.whole)}, for as long as you want it"
    if not dry_run:
        # The copy first: should this end in between, the same command finds a copy that has what it would write.
        if remote is not None:
            remote.replace_journal(content)
        replace_file(path, content)
    yield f"run {run}: {path} {would}shortened from {len(journal.whole)} to {len(content)} bytes{kept}"


def _record_of(run: str, folder: Path, journal: JournalContent) -> RunRecord | None:
    """Return the record of the newest round that a journal commits; None if it commits none.

    Raises:
        UserError: there is none, it is another run's, or there are newer rounds.
    """
    newest = newest_snapshot(folder)
    if newest > journal.newest:
        raise UserError(
            f"run {run}: {folder} has {snapshot_name(newest)}, and the newest round of its journal is "
            f"{journal.newest}; start the server and stop it again, which commits that round or says what is missing"
        )
    if journal.newest < 0:
        return None
    path = folder / "snapshots" / snapshot_name(journal.newest)
    record = whole_record(path, run)
    if record is None:
        raise UserError(
            f"run {run}: {path} is of a release of megatron_ext whose snapshots say nothing of the run; make a round "
            "with this release first"
        )
    if record.digest != journal.newest_digest:
        raise of_another_run(run, path, record, journal.newest_digest)
    if not has_its_beginning(journal, record):
        raise UserError(f"run {run}: {folder / JOURNAL} has lost lines; run megatron-ext server recover first")
    return record


def _compacted(journal: JournalContent, record: RunRecord, rounds: int) -> bytes:
    """Return the shorter journal, the same whenever it is made."""
    lines = journal.whole.splitlines(keepends=True)
    committed = [at for at, event in enumerate(journal.events) if event["event"] == "committed"]
    newest = committed[-1]
    begin = committed[-1 - rounds] + 1 if len(committed) > rounds else 0
    _, state = line_of(record.events()[0], journal.events[newest]["time"])
    return b"".join([*lines[begin:newest], state, *lines[newest:]])


def _check_same_state(run: str, folder: Path, before: bytes, after: bytes) -> None:
    """Check that both journals lead to the same state, whatever is wrong with one of them."""
    states = [run_state_after(run, folder, content).as_json() for content in (before, after)]
    if states[0] != states[1]:
        differing = sorted(key for key in states[0] if states[0][key] != states[1].get(key))
        raise UserError(
            f"run {run}: the snapshot of its newest round tells another state than {folder / JOURNAL} "
            f"({', '.join(differing)}), and nothing was changed; report this with both files"
        )


def _kept(path: Path, content: bytes) -> Path:
    """Write what a journal has said next to it, compressed, under an unused name."""
    number = 1
    while (kept := path.with_name(f"{path.name}.compacted-{number}.gz")).exists():
        number += 1
    with kept.open("xb") as file:
        with gzip.GzipFile(fileobj=file, mode="wb") as packed:
            packed.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_path(path.parent)
    return kept
