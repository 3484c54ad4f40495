# SPDX-License-Identifier: Apache-2.0
"""Rebuilding the journal of a run that has lost lines, from the record in its newest snapshot.

What the journal still has stays, for people; after it comes the state of the run before the newest round, and the line
that commits that. What was journaled after that round had been made is lost, and nothing else: peers that have
registered since have to be started again, and contributions to the next round are asked for once more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_ext.errors import UserError, combine
from megatron_ext.sync_service.disk.durable import replace_file, sync_path
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.evidence import (
    has_its_beginning,
    lost_lines,
    lost_rounds,
    newest_snapshot,
    newest_spooled,
    of_another_run,
    state_after,
    whole_record,
)
from megatron_ext.sync_service.rounds.folder_lock import locked
from megatron_ext.sync_service.rounds.journal import JournalContent, line_of, parse_journal
from megatron_ext.sync_service.rounds.members import Policy
from megatron_ext.sync_service.rounds.round import RunState
from megatron_ext.sync_service.rounds.run_record import RunRecord
from megatron_ext.sync_service.shards.remote import RemoteState
from megatron_ext.sync_service.shards.remote_shard_copy import IDENTITY

__all__ = ["JOURNAL", "each_run", "recover", "run_state_after"]

JOURNAL = "journal.jsonl"
"""The file in the folder of a run."""

_ALL_NAMED = "the journal names all rounds that there are snapshots of"


@dataclass(frozen=True, kw_only=True)
class _Rebuilt:
    """A journal that explains its folder again."""

    content: bytes
    """What it says."""

    state: RunState
    """The run's, as it says."""


def recover(folder: Path, *, run: str | None, url: str | None, dry_run: bool) -> Iterator[str]:
    """Rebuild the journals that have lost lines of the runs in a folder; yields what was done, line by line.

    Args:
        folder: of a server that does not run, or of one of its runs.
        run: the run id, of that one alone; all runs when None.
        url: of the copy of the server's state (`state`), which is brought up to date too; None without one.
        dry_run: whether nothing is changed.

    Raises:
        UserError: a server uses the folder, or there is a run that cannot be recovered; the others were.
    """
    yield from each_run(folder, run, url, "server recover", lambda path: _recover_run(path, url, dry_run))


def each_run(
    folder: Path, run: str | None, url: str | None, command: str, work: Callable[[Path], Iterator[str]]
) -> Iterator[str]:
    """Work on the runs in the folder of a server that does not run; yields what was done, line by line.

    Args:
        folder: of the server, or of one of its runs.
        run: the run id, of that one alone; all runs when None.
        url: of the copy of the server's state; None without one.
        command: what does it, in messages.
        work: on the folder of a run.

    Raises:
        UserError: a server uses the folder, a run is a shard's, or `work` has refused it; the others were worked on.
    """
    server, runs = _runs_in(folder, run, has_copy=url is not None)
    problems = []
    with locked(server):
        for path in runs:
            try:
                if (path / IDENTITY).exists():
                    raise UserError(
                        f"run {path.name}: {path} has the values of a shard, whose journal is at the first server; "
                        "give that one's folder"
                    )
                yield from work(path)
            except OSError as error:
                problems.append(f"run {path.name}: {error}")
            except UserError as error:
                problems.append(str(error))
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise combine(problems, f"{command} {folder}")


def _runs_in(folder: Path, run: str | None, *, has_copy: bool) -> tuple[Path, Sequence[Path]]:
    """Return the folder of the server, and those of the runs that are meant."""
    folder = folder.absolute()
    if (folder / "runs").is_dir():
        found = sorted(path for path in (folder / "runs").iterdir() if path.is_dir() and run in (None, path.name))
        if not found:
            raise UserError(f"{folder}: has no run{'' if run is None else f' {run!r}'}; look into {folder / 'runs'}")
        return folder, found
    # One that has nothing yet may have it from the copy.
    is_begun = has_copy and folder.is_dir() and folder.parent.name == "runs"
    if not (is_begun or (folder / "snapshots").is_dir() or (folder / JOURNAL).exists()):
        raise UserError(f"{folder}: is not a server's folder, nor that of a run; give DIR, or DIR/runs/RUN")
    if run not in (None, folder.name):
        raise UserError(f"--run is {run}, but {folder} is the folder of run {folder.name}; drop the flag")
    return folder.parents[1] if folder.parent.name == "runs" else folder, [folder]


def _recover_run(folder: Path, url: str | None, dry_run: bool) -> Iterator[str]:
    run, path = folder.name, folder / JOURNAL
    remote = None if url is None else RemoteState(url, run)
    here = path.read_bytes() if path.exists() else b""
    journal = _longest(run, parse_journal(here), remote)
    with _with_copies(folder, remote, dry_run) as places:
        rebuilt = _rebuilt(run, folder, places, journal)
    if isinstance(rebuilt, str):
        yield f"run {run}: nothing to recover: {rebuilt}"
        return
    newest = rebuilt.state.newest
    assert newest is not None
    by_index = sorted(rebuilt.state.members.values(), key=lambda member: member.index)
    members = ", ".join(f"{member.name} (index {member.index})" for member in by_index) or "none"
    would = "would be " if dry_run else ""
    yield f"run {run}: recovered at round {newest.number}, whose digest is {newest.digest}; its members: {members}"
    yield f"  what was journaled before: {len(journal.events)} whole lines, the newest round {journal.newest}"
    yield "  what was journaled after that round is lost: peers that have registered since have to be started again"
    if not dry_run:
        yield from _write(folder, rebuilt.content, remote)
    yield f"  {path} {would}written; {'nothing was changed' if dry_run else 'start the server again'}"


def _longest(run: str, here: JournalContent, remote: RemoteState | None) -> JournalContent:
    """Return the journal that has more lines, of the folder's and the copy's."""
    if remote is None:
        return here
    there = parse_journal(remote.journal)
    longest = max(here, there, key=lambda content: len(content.whole))
    if not all(longest.whole.startswith(content.whole) for content in (here, there)):
        raise UserError(
            f"run {run}: its folder and the copy have different histories; recover without --state the one that should "
            "count, and give the server another URL"
        )
    return longest


@contextmanager
def _with_copies(folder: Path, remote: RemoteState | None, dry_run: bool) -> Iterator[Sequence[Path]]:
    """Yield where snapshots are: in the folder of the run, with those that are at the URL alone."""
    snapshots = folder / "snapshots"
    if remote is None:
        yield [folder]
        return
    known = {path.name for path in snapshots.iterdir()} if snapshots.is_dir() else set()
    if not dry_run:
        snapshots.mkdir(parents=True, exist_ok=True)
        remote.get_snapshots(snapshots, known)
        yield [folder]
        return
    with TemporaryDirectory() as name:
        (Path(name) / "snapshots").mkdir()
        remote.get_snapshots(Path(name) / "snapshots", known)
        yield [folder, Path(name)]


def _rebuilt(run: str, folder: Path, places: Sequence[Path], journal: JournalContent) -> _Rebuilt | str:
    """Return the journal that a run should have, or in words why it needs no other.

    Raises:
        UserError: there is no snapshot that it could be rebuilt from.
    """
    place = max(places, key=newest_snapshot)
    newest = newest_snapshot(place)
    if newest < journal.newest:
        raise UserError(
            f"run {run}: the journal commits round {journal.newest}, and {folder} has "
            f"{'no snapshot' if newest < 0 else f'no newer snapshot than {snapshot_name(newest)}'}: the values are "
            "lost; restore the snapshot from a copy"
        )
    if newest < 0 and journal.damage:
        raise UserError(
            f"run {run}: {folder / JOURNAL}: {journal.damage}, and no round was committed before it, so that there is "
            "nothing to rebuild it from; restore it from a copy, or move the run's folder away to start it over"
        )
    if newest_spooled(folder) > newest + 1:
        raise (lost_lines if newest < 0 else lost_rounds)(run, folder, newest)
    if newest < 0:
        return _ALL_NAMED
    path = place / "snapshots" / snapshot_name(newest)
    record = whole_record(path, run, is_committed=newest == journal.newest)
    if newest == journal.newest:
        state = _explained(run, folder, path, journal, record)
        if state is not None:
            return _Rebuilt(content=journal.whole, state=state) if journal.damage else _ALL_NAMED
    if record is None:
        raise UserError(
            f"run {run}: {path} is of a release of megatron_ext whose snapshots say nothing of the run: who its peers "
            "are, up to where their samples count, and the outer optimizer's step are lost with the journal; restore "
            f"{folder / JOURNAL} from a copy, or begin a run under another name from a peer's checkpoint"
        )
    if not journal.damage and newest == journal.newest + 1 and record.follows(journal.whole):
        return f"the journal has all lines from before round {newest} was made; the next start of the server commits it"
    return _after_record(run, folder, journal, record)


def _explained(
    run: str, folder: Path, path: Path, journal: JournalContent, record: RunRecord | None
) -> RunState | None:
    """Return the state after a journal that names the newest snapshot; None if it has lost lines before that.

    Args:
        run: the run id.
        folder: of the run.
        path: of the snapshot.
        journal: the journal.
        record: of the snapshot, None where that has none.

    Raises:
        UserError: the snapshot is another run's, or has no record and the journal has lost lines.
    """
    if record is not None and record.digest != journal.newest_digest:
        raise of_another_run(run, path, record, journal.newest_digest)
    if record is not None and not has_its_beginning(journal, record):
        return None
    try:
        return run_state_after(run, folder, journal.whole)
    except UserError:
        if record is None:
            raise
        return None


def _after_record(run: str, folder: Path, journal: JournalContent, record: RunRecord) -> _Rebuilt:
    begun = [event for event in journal.events if event["event"] == "created"]
    created = record.before["created"]
    if begun and any(begun[-1].get(key) != created[key] for key in ("config", "catalog", "sharding")):
        raise UserError(
            f"run {run}: {folder / JOURNAL} is of another run than {snapshot_name(record.number)} next to it; move "
            "the one away that does not belong there"
        )
    content = journal.whole + b"".join(line_of(event)[1] for event in record.events())
    return _Rebuilt(content=content, state=run_state_after(run, folder, content))


def run_state_after(run: str, folder: Path, content: bytes) -> RunState:
    """Return the state of a run after all that a journal says."""
    journal = parse_journal(content)
    created = [event["state"]["created"] if event["event"] == "recovered" else event for event in journal.counting]
    kinds = [event.get("rounds") for event in created if event is not None and "catalog" in event]
    kind = AsynchronousState if kinds[-1:] == ["asynchronous"] else RunState
    return state_after(run, folder, journal, kind(Policy(peers=1, quorum=1, grace_seconds=0.0)))


def _write(folder: Path, content: bytes, remote: RemoteState | None) -> Iterator[str]:
    """Put a journal in its place; the former one stays next to it."""
    path = folder / JOURNAL
    if path.exists():
        yield f"  the former journal is kept as {_kept(path)}"
    replace_file(path, content)
    if remote is not None:
        kept = remote.replace_journal(content)
        yield f"  the copy's journal was replaced as well{f', and is kept as {kept} there' if kept else ''}"


def _kept(path: Path) -> Path:
    """Copy a file into its folder, under an unused name."""
    number = 1
    while True:
        kept = path.with_name(f"{path.name}.lost-{number}")
        try:
            with kept.open("xb") as file:
                file.write(path.read_bytes())
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            number += 1
            continue
        sync_path(path.parent)
        return kept
