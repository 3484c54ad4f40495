# SPDX-License-Identifier: Apache-2.0
"""Dropping the lines of a journal that nothing needs any more: those before the newest rounds.

Lines are only added to a journal, and those of years ago are read at every start. In their place comes the state of
the run before the newest round, as that round's snapshot tells it; the line that commits the round and those after it
stay as they are, and so do the lines of some rounds before, for people. The server must not run meanwhile.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.durable import replace_file
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.rounds.evidence import (
    has_its_beginning,
    newest_snapshot,
    of_another_run,
    whole_record,
)
from megatron_ext.sync_service.rounds.journal import JournalContent, line_of, parse_journal, read_whole_journal
from megatron_ext.sync_service.rounds.run_record import RunRecord
from megatron_ext.sync_service.rounds.server_commands import recover_command
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
    remote = None if url is None else RemoteState(url, run)
    if remote is not None and remote.journal and not journal.events:
        raise UserError(
            f"run {run}: {folder} has nothing of what is at state {url}; start the server with both and stop it again, "
            "which fetches that"
        )
    record = _record_of(run, folder, journal, url)
    if record is None:
        yield f"run {run}: nothing to compact: no round was committed"
        return
    before = journal.whole
    content = _compacted(journal, record, rounds)
    if len(content) >= len(before):
        content = before
    else:
        _check_same_state(run, folder, before, content)
    if remote is not None and not _is_copy(run, folder, remote.journal, before, content):
        raise UserError(
            f"run {run}: {folder} and state {url} have different histories: one of them is of another run, or of "
            "another copy of this one; give the URL that belongs to the folder"
        )
    if content == before and (remote is None or remote.journal == before):
        yield f"run {run}: nothing to compact: {len(before)} bytes, nearly all of the newest {rounds} rounds (--rounds)"
        return
    would = "would be " if dry_run else ""
    kept = ""
    if not dry_run:
        kept = f"; the former one is kept as {_kept(path, before)}, for as long as you want it"
        # The copy first: should this end in between, the same command finds a copy that has the same state.
        if remote is not None:
            there = remote.replace_journal(content)
            kept += f", and that of the copy as {there} there" if there else ""
        replace_file(path, content)
    yield f"run {run}: {path} {would}shortened from {len(before)} to {len(content)} bytes{kept}"


def _is_copy(run: str, folder: Path, there: bytes, before: bytes, after: bytes) -> bool:
    """Return whether a copy's journal is the folder's: whole, cut off by an end in between, or compacted before."""
    if before.startswith(there) or after.startswith(there):
        return True
    if parse_journal(there).damage:
        return False
    return run_state_after(run, folder, there).as_json() == run_state_after(run, folder, before).as_json()


def _record_of(run: str, folder: Path, journal: JournalContent, url: str | None) -> RunRecord | None:
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
    record = whole_record(path, run, is_committed=True)
    if record is None:
        raise UserError(
            f"run {run}: {path} is of a release of megatron_ext whose snapshots say nothing of the run; make a round "
            "with this release first"
        )
    if record.digest != journal.newest_digest:
        raise of_another_run(run, path, record, journal.newest_digest)
    if not has_its_beginning(journal, record):
        raise UserError(f"run {run}: {folder / JOURNAL} has lost lines; first run: {recover_command(folder, url)}")
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
    """Have what a journal has said next to it, compressed, under a name of its own."""
    number = 1
    while (kept := path.with_name(f"{path.name}.compacted-{number}.gz")).exists():
        if gzip.decompress(kept.read_bytes()) == content:
            return kept
        number += 1
    replace_file(kept, gzip.compress(content))
    return kept
