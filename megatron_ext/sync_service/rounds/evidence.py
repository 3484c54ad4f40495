# SPDX-License-Identifier: Apache-2.0
"""What a server does at its start with snapshots that the journal does not name: the rule.

The newest round that the journal commits is J, so that round J + 1 is open. S is the newest round in the folder.

- S <= J: the journal names it. Rounds that are older than those which are kept are removed; so are unfinished files.
  Where one that is kept has a record, its digest is the journal's, or the start is refused; and so it is where the
  journal has not all lines any more that the newest one's record tells of: some at its head or in its middle were lost.
  (A journal that was rebuilt since has other lines, with the same state.)
- S = J + 1, a whole file with a record (see `run_record`): the round was made and decided, by all shards, and at most
  its line in the journal is missing: the server was killed before it was written, or it was lost.
    - The journal has all lines that there were then, and the round is closed with the same contributions: the line is
      written again, as the record has it. The round has the same bits, and what it counts is counted once.
    - It has all these lines, and continues otherwise: a contribution of the round was asked for once more. It is not
      committed, and the file stays until the round, made again, replaces it.
    - It has not: lines were lost. The start is refused.
- S = J + 1, a whole file without a record, as releases before this one wrote them: if the round is closed and its
  contributions are there, it is made again, with the same bits. Otherwise the start is refused.
- S = J + 1, a damaged file: the start is refused.
- S > J + 1, or a folder for contributions to a round after the open one: lines were lost. The start is refused.

A journal that is missing or empty is one that commits no round (J = -1). A refused start changes nothing. Nothing is
ever removed at a start but what the journal shows to be over. `recovery` rebuilds a journal that has lost lines.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import newest_of, snapshot_name, snapshot_number
from megatron_ext.sync_service.rounds.journal import Event, JournalContent, restore_or_rebuild
from megatron_ext.sync_service.rounds.round import RunState
from megatron_ext.sync_service.rounds.run_record import RunRecord
from megatron_ext.sync_service.values.contribution import peer_of
from megatron_ext.sync_service.values.spool import round_of

__all__ = [
    "check_beginning",
    "check_lines",
    "check_start",
    "has_its_beginning",
    "lost_lines",
    "lost_rounds",
    "newest_snapshot",
    "newest_spooled",
    "of_another_run",
    "state_after",
    "whole_record",
]


def check_start(run: str, folder: Path, keep_snapshots: int, journal: bytes, state: RunState) -> RunRecord | None:
    """Find out whether the journal explains what is in the folder of a run. Nothing is changed.

    Args:
        run: the run id.
        folder: of the run.
        keep_snapshots: how many committed rounds stay on the disk.
        journal: the whole lines of its journal.
        state: of the run, as these say.

    Returns:
        The record of the open round if that is to be committed as it is; None if there is nothing to do.

    Raises:
        UserError: the journal has lost lines, or a snapshot is damaged, missing or another run's.
    """
    open_round = state.open_round
    record = check_lines(run, folder, journal, open_round - 1)
    has_snapshot = (folder / "snapshots" / snapshot_name(open_round)).exists()
    if has_snapshot and record is None and not _can_be_made_again(folder, state):
        raise lost_lines(run, folder, open_round - 1)
    if record is not None and not _is_closed_as(record, state):
        record = None
    if newest_spooled(folder) > open_round + (record is not None):
        raise lost_lines(run, folder, open_round - 1)
    _check_kept(run, folder, keep_snapshots, state)
    return record


def check_lines(run: str, folder: Path, journal: bytes, newest: int) -> RunRecord | None:
    """Find out whether a journal has all lines that the newest snapshot in the folder of a run tells of.

    Args:
        run: the run id.
        folder: of the run.
        journal: whole lines.
        newest: the newest round that they commit; -1 for none.

    Returns:
        The record of the open round; None without its snapshot, or where that has none.

    Raises:
        UserError: it has lost lines, or the open round's snapshot is damaged.
    """
    found = newest_snapshot(folder)
    record = None
    if found == newest + 1:
        record = whole_record(folder / "snapshots" / snapshot_name(found), run, is_committed=False)
    if found > newest + 1 or (record is not None and not record.follows(journal)):
        raise lost_lines(run, folder, newest)
    return record


def lost_rounds(run: str, folder: Path, newest: int) -> UserError:
    """Return the error that says that rounds were committed whose snapshots are gone.

    Args:
        run: the run id.
        folder: of the run.
        newest: the newest round of which there is a whole snapshot.
    """
    spooled = newest_spooled(folder)
    gone = f"round {newest + 1}" if spooled == newest + 2 else f"rounds {newest + 1} to {spooled - 1}"
    return UserError(
        f"run {run}: {folder} has contributions to round {spooled} or a folder for them, spool/round-{spooled:08d}, so "
        f"that {gone} had been committed, and the newest snapshot is {snapshot_name(newest)}; restore newer ones from "
        "a copy, or give up what was made since: move that folder out, and do this again"
    )


def check_beginning(run: str, folder: Path, journal: JournalContent) -> None:
    """Find out whether a journal still begins as it did when the newest of its rounds had been made.

    Args:
        run: the run id.
        folder: of the run.
        journal: its journal.

    Raises:
        UserError: it does not, or the snapshot of that round is damaged.
    """
    path = folder / "snapshots" / snapshot_name(journal.newest)
    if journal.newest < 0 or not path.exists():
        return
    record = _record_in(path, run)
    # That a snapshot is of another run is said elsewhere.
    is_its_own = record is not None and record.digest == journal.newest_digest
    if record is not None and is_its_own and not has_its_beginning(journal, record):
        raise UserError(
            f"run {run}: {folder / 'journal.jsonl'} lacks lines from before round {journal.newest}, which "
            f"{path.name} tells of, and nothing was changed; {restore_or_rebuild(folder)}"
        )


def has_its_beginning(journal: JournalContent, record: RunRecord) -> bool:
    """Return whether a journal has all lines that it had when a round was made.

    Args:
        journal: the journal.
        record: of the snapshot of the newest round that it commits.
    """
    return journal.rebuilt_at >= record.number or record.follows(journal.whole)


def state_after(run: str, folder: Path, journal: JournalContent, state: RunState) -> RunState:
    """Return a new state after all that a journal says.

    Args:
        run: the run id.
        folder: of the run.
        journal: its journal.
        state: a new one, which is changed.

    Raises:
        UserError: an event makes no sense after those before it: lines between them were lost.
    """
    for event in journal.counting:
        try:
            state.apply(event)
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"run {run}: {folder / 'journal.jsonl'} lacks lines before {event['event']!r} of {_subject(event)} "
                f"({type(error).__name__}: {error}), and nothing was changed; {restore_or_rebuild(folder)}"
            ) from error
    return state


def _subject(event: Event) -> str:
    return " in ".join(
        f"{kind} {event[key]!r}" for key, kind in (("peer", "peer"), ("round", "round")) if key in event
    )


def newest_snapshot(folder: Path) -> int:
    """Return the newest round that there is a snapshot of in the folder of a run; -1 without any."""
    return newest_of(path.name for path in _entries(folder / "snapshots"))


def newest_spooled(folder: Path) -> int:
    """Return the newest round that there is a folder for contributions to, which may be empty; -1 without any."""
    return max((number for path in _entries(folder / "spool") if (number := round_of(path)) is not None), default=-1)


def whole_record(path: Path, run: str, *, is_committed: bool) -> RunRecord | None:
    """Return the record in a snapshot, if there is one, after looking at all checksums.

    Args:
        path: of the snapshot.
        run: the run id.
        is_committed: whether the journal commits its round.

    Raises:
        UserError: it is damaged, or not there.
    """
    try:
        with closing(Snapshot(path)) as found:
            found.check()
            return RunRecord.of(found)
    except (UserError, OSError) as error:
        if is_committed:
            what = "is damaged" if path.exists() else "is not there"
            raise UserError(
                f"run {run}: {path} {what}, and the journal commits its round; restore the file from a copy ({error})"
            ) from error
        raise UserError(
            f"run {run}: {path} is damaged, and the journal does not say whether its round was committed; restore the "
            f"file from a copy, or move it out of the folder, which gives that round up ({error})"
        ) from error


def lost_lines(run: str, folder: Path, newest: int) -> UserError:
    """Return the error that says that a journal has lost lines.

    Args:
        run: the run id.
        folder: of the run.
        newest: the newest round that its journal commits; -1 for none.
    """
    found = []
    has_snapshot, spooled = newest_snapshot(folder) > newest, newest_spooled(folder)
    if has_snapshot:
        names = sorted(path.name for path in _entries(folder / "snapshots") if snapshot_number(path.name) is not None)
        found.append(f"the snapshots {', '.join(names)}")
    if spooled > newest + 1 and any((folder / "spool").glob(f"round-{spooled:08d}/*.frames")):
        found.append(f"contributions to round {spooled}")
    elif not has_snapshot:
        found.append(f"the empty folder spool/round-{spooled:08d}, made when round {spooled - 1} was committed")
    if has_snapshot:
        way_out = restore_or_rebuild(folder)
    else:
        way_out = (
            "there is no snapshot that it could be rebuilt from, so restore journal.jsonl and the snapshots from a "
            "copy, or begin a run under another name from a peer's checkpoint"
        )
    return UserError(
        f"run {run}: {folder} has {' and '.join(found)}, but {_said_of_journal(folder, newest)}: the journal has lost "
        f"lines, and nothing was changed; {way_out}"
    )


def _said_of_journal(folder: Path, newest: int) -> str:
    path = folder / "journal.jsonl"
    if newest >= 0:
        return f"the newest round of journal.jsonl is {newest}"
    if not path.exists():
        return "there is no journal.jsonl"
    return "journal.jsonl is empty" if path.stat().st_size == 0 else "journal.jsonl commits no round"


def _check_kept(run: str, folder: Path, keep_snapshots: int, state: RunState) -> None:
    """Compare the snapshots that are kept with the rounds that the journal names."""
    for number in range(max(0, state.open_round - keep_snapshots), state.open_round):
        path = folder / "snapshots" / snapshot_name(number)
        # Older ones may be gone: fewer were kept.
        if not path.exists() and number < state.open_round - 1:
            continue
        made, named = _record_in(path, run), state.results.get(number)
        if made is not None and named is not None and made.digest != named.digest:
            raise of_another_run(run, path, made, named.digest)


def _record_in(path: Path, run: str) -> RunRecord | None:
    """Return the record in a snapshot that the journal names, if there is one.

    Raises:
        UserError: it is damaged, or there is no such file.
    """
    with closing(Snapshot(path)) as found:
        try:
            return RunRecord.of(found)
        except OSError as error:
            raise UserError(f"run {run}: {error}") from error


def of_another_run(run: str, path: Path, made: RunRecord, named: str) -> UserError:
    """Return the error that says that a snapshot is not that of the journal's round.

    Args:
        run: the run id.
        path: of the snapshot.
        made: its record.
        named: the digest of the round in the journal.
    """
    return UserError(
        f"run {run}: {path} has the digest {made.digest}, and round {made.number} of journal.jsonl {named}: one of "
        "them is of another run, or of another copy of this one; restore the one that belongs to the other"
    )


def _is_closed_as(record: RunRecord, state: RunState) -> bool:
    """Return whether the open round is closed, with the contributions that the record's round was made of."""
    involved = {*record.committed["contributors"], *record.committed["rejected"]}
    return state.closing is not None and set(state.closing) == involved


def _can_be_made_again(folder: Path, state: RunState) -> bool:
    """Return whether the open round is closed, and a file is there for every contribution to it."""
    found = {(round_of(path.parent), peer_of(path)) for path in (folder / "spool").glob("round-*/*.frames")}
    return state.closing is not None and all((state.made_for(peer), peer) in found for peer in state.closing)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
