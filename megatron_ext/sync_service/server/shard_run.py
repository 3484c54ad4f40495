# SPDX-License-Identifier: Apache-2.0
"""A run on a server that has a part of its values, and does what the first server says.

It has no journal. The first server tells it, whenever something changes and once a second, how the run stands (its
*word*): which round is open, and which processes speak for its members. A call of a peer that does not go with the last
word is answered when two more have come, the second of which is certainly newer than the call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.sync_service.disk.durable import replace_file
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.field_checks import Malformed, check_count, check_text
from megatron_ext.sync_service.protocol.frames import Frame
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.schema import parse, record
from megatron_ext.sync_service.rounds.changes import Changes
from megatron_ext.sync_service.rounds.draining import Draining
from megatron_ext.sync_service.rounds.room import check_room
from megatron_ext.sync_service.server.config import ServerConfig
from megatron_ext.sync_service.shards.remote_shard_copy import IDENTITY, ShardCopy
from megatron_ext.sync_service.shards.shard import Shard
from megatron_ext.sync_service.shards.shard_calls import Followed, Identity, Seal, Word, Work, check_work
from megatron_ext.sync_service.shards.shard_messages import (
    damaged_message,
    followed_message,
    made_message,
    measured_message,
    read_seal,
    read_word,
    read_work,
    squares_message,
)
from megatron_ext.sync_service.values.contribution import Contribution
from megatron_ext.sync_service.values.failpoints import Failpoints
from megatron_ext.sync_service.values.open_values import OpenValues
from megatron_ext.sync_service.values.receive import receive
from megatron_ext.sync_service.values.reduction import DamagedContribution

__all__ = ["ShardRun"]

log = logging.getLogger(__name__)

WORD_SECONDS = 5.0
"""How long a call waits for the first server's word."""

_NOTHING = Word(shards=(), config={}, id="", open_round=0, members={}, kept={}, used={}, last_round=None)
"""What is known before the first word."""


class ShardRun:
    """A part of a run that is being served. Its methods may be called from several threads."""

    def __init__(self, name: str, server: ServerConfig, folder: Path, failpoints: Failpoints) -> None:
        """Open the folder; what is in it is used once the first server has said how the run stands.

        Args:
            name: the run id.
            server: configuration of this server, the run's among it.
            folder: where its values are; made when it is not there.
            failpoints: where to die in tests.

        Raises:
            UserError: the folder is not one of a shard, or is damaged.
        """
        self.name = name
        self.config = server.runs[name]
        self._server = server
        self._title = f"shard {server.shard}"
        self._identity = folder / IDENTITY
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "journal.jsonl").exists():
            raise UserError(f"{folder}: belongs to a server that has whole runs; give {self._title} another dir")
        self._copy = None if server.state is None else ShardCopy(server.state, name, server.shard)
        if self._copy is not None:
            self._copy.meet(folder)
        self._shard = Shard(self.config, folder, server.keep_snapshots, failpoints)
        self._failpoints = failpoints
        self.changes = Changes()
        self._working = threading.Lock()
        self._tickets = 0
        self._word = _NOTHING
        self._heard = 0
        self._refused = ""
        """Why the first server's last word was refused; empty where it was not."""
        self._draining = Draining()

    # -----------------------------------------------------------------------------------------------------------
    # What peers ask for
    # -----------------------------------------------------------------------------------------------------------

    async def hear(self, peer: str, instance: str, least: int) -> None:
        """Wait until the first server's word says that a process speaks for a peer, or certainly does not.

        Args:
            peer: its name.
            instance: which process speaks for it.
            least: the open round must be so far.

        Raises:
            Refusal: the first server has not called.
        """

        def fits(word: Word) -> bool:
            return word.members.get(peer) == instance and word.open_round >= least

        heard, end = self._heard, time.monotonic() + WORD_SECONDS
        with self.changes.watched() as changed:
            while True:
                changed.clear()
                if fits(self._word) or self._heard >= heard + 2:
                    return
                try:
                    await asyncio.wait_for(changed.wait(), end - time.monotonic())
                except TimeoutError:
                    raise self._no_word() from None

    def check_caller(self, peer: str, instance: str) -> None:
        """See `Run.check_caller`."""
        with self.changes:
            self._check_caller(peer, instance)

    def upload(self, peer: str, instance: str, number: int, frames: Iterable[Frame]) -> tuple[bool, int, int]:
        """See `Run.upload`."""
        return receive(lambda: self._contribution(peer, instance, number), frames, self._failpoints)

    @property
    def codec(self) -> str:
        """In which updates travel."""
        return self._shard.result_codec

    @contextmanager
    def snapshot(self, peer: str, instance: str, number: int) -> Iterator[tuple[Snapshot, Catalog]]:
        """See `Run.snapshot`."""
        with self.changes:
            self._check_caller(peer, instance)
            if number not in self._shard.snapshots:
                newest = self._word.open_round - 1
                raise Refusal(
                    "not_found", f"the values of round {number} are not on {self._title}; the newest is {newest}"
                )
            self._draining.begin_fetching(peer, number)
            reading = ExitStack()
            found = reading.enter_context(self._shard.snapshots[number].reading())
            catalog = self._shard.catalog
        try:
            with reading:
                yield found, catalog
        finally:
            with self.changes:
                self._draining.end_fetching()

    def open_values(self, peer: str, instance: str, number: int) -> OpenValues | None:
        """See `Run.open_values`."""
        with self.changes:
            self._check_caller(peer, instance)
            if number != self._word.open_round or number == 0 or self.config.is_asynchronous:
                return None
        return self._shard.open_values(number)

    # -----------------------------------------------------------------------------------------------------------
    # What the first server asks for
    # -----------------------------------------------------------------------------------------------------------

    def answer(self, request: Any) -> Any:
        """Do what the first server asks for.

        Args:
            request: a ShardRequest; see shard_calls.py.

        Returns:
            A ShardReply.

        Raises:
            Refusal: it is not such a request, or does not fit this shard.
            OSError: the disk refuses.
        """
        match request.WhichOneof("call"):
            case "follow":
                return pb2.ShardReply(follow=self._follow(read_word(request.follow, "follow")))
            case "seal":
                return pb2.ShardReply(seal=self._seal(read_seal(request.seal, "seal")))
            case "measure" | "common_squares" | "write" as call:
                return self._work(call, read_work(getattr(request, call), call))
        raise Refusal("invalid", "nothing is asked for that a shard does; install the same release everywhere")

    def _follow(self, word: Word) -> Any:
        try:
            followed = self._followed(word)
        except Refusal as refusal:
            # The first server asks every second, and has it in its log; here it is where an operator looks as well.
            if str(refusal) != self._refused:
                log.error("run %s: cannot follow the first server: %s", self.name, refusal)
            self._refused = str(refusal)
            raise
        if not followed.wants_catalog:  # else the same word comes once more, with it
            self._refused = ""
        return followed

    def _followed(self, word: Word) -> Any:
        self._check(word)
        with self.changes:
            wants_catalog = bool(word.id) and not self._shard.is_open and word.catalog is None
            if word.id and not wants_catalog:
                try:
                    self._go_to(word)
                except UserError as error:
                    raise Refusal(
                        "state", f"its folder lacks values of run {self.name!r}, or they are damaged: {error}"
                    ) from error
            if not wants_catalog:
                self._word = word
                self._heard += 1
                self.changes.notify_all()
        spooled = self._shard.spool.nbytes
        return followed_message(Followed(wants_catalog=wants_catalog, spooled=spooled, codecs=CODECS.packages()))

    def _check(self, word: Word) -> None:
        """Check that both servers mean the same.

        Raises:
            Refusal: they do not.
        """
        wanted, found = word.shards, tuple(self._server.shards)
        if wanted != found:
            raise Refusal(
                "state", f"its shards are {', '.join(found)}, and those of the first server {', '.join(wanted)}"
            )
        if word.shard != self._server.shard:
            raise Refusal("state", f"it was started with --shard {self._server.shard}")
        for field, value in asdict(self.config).items():
            if word.config.get(field) != value:
                theirs = word.config.get(field)
                raise Refusal(
                    "state", f"run {self.name!r}: {field} is {value!r} there, and {theirs!r} at the first server"
                )
        if not self._identity.exists():
            return
        try:
            known = record(
                parse(self._identity.read_bytes()),
                IDENTITY,
                Identity,
                id=check_text,
                shard=check_count,
                shards=check_count,
            )
        except Malformed as error:
            raise Refusal("state", f"{self._identity} is damaged ({error}); restore it from a copy") from error
        if known != Identity(id=word.id, shard=word.shard, shards=len(wanted)):
            raise Refusal(
                "state",
                f"its folder {self._identity.parent} has shard {known.shard} of {known.shards} of another run "
                f"{self.name!r} (id {known.id}; the first server's is {word.id or 'not begun'}); give it the "
                "folder that belongs to this run, or an empty one for a new run",
            )

    def _go_to(self, word: Word) -> None:
        """Do what a newer word says; with the lock held.

        Raises:
            UserError: values are missing or damaged.
        """
        open_round, members, kept = word.open_round, word.members, word.kept
        self._check_newest(self._word.open_round - 1, open_round - 1)
        spool = self._shard.spool
        if not self._shard.is_open:
            self._open(word)
            # What is not whole for sure may be cut off.
            spool.keep(
                lambda peer, number: peer in kept or spool.sealed_by(peer, number) == members.get(peer, object())
            )
        elif open_round > self._word.open_round:
            self._shard.committed(open_round - 1)
            if self._copy is not None:
                self._copy.drop_snapshots({snapshot_name(number) for number in (*self._shard.snapshots, open_round)})
        for peer, instance in self._word.members.items():
            if members.get(peer) != instance and peer not in kept:
                spool.discard(peer)
        spool.keep(lambda peer, number: self._counts(word, peer, number) is True)
        if word.last_round is not None:
            self._draining.begin(word.last_round)

    def _open(self, word: Word) -> None:
        """Begin with what there is of the run, or with nothing at its beginning.

        Raises:
            Refusal: the first server has lost rounds, or the disk has no room for one.
            UserError: values are missing or damaged.
        """
        # One round more may have been made, which the first server commits or has made again.
        self._check_newest(self._shard.newest_file, word.open_round)
        content = json.dumps(asdict(Identity(id=word.id, shard=word.shard, shards=len(word.shards)))).encode()
        if self._shard.newest_file >= 0 and not self._identity.exists():
            raise UserError(
                f"{self._identity} is missing, which says to which run the snapshots next to it belong; restore it "
                f"from a copy; if they are this run's, write {content.decode()} into it"
            )
        self._shard.recover(word.open_round)
        assert word.catalog is not None
        if not self._identity.exists():
            check_room(self._identity.parent, self.config, word.catalog, word.codec, self._server.keep_snapshots)
            if self._copy is not None:
                self._copy.put_identity(content)
            replace_file(self._identity, content)
        self._shard.open(word.catalog, word.codec)

    def _check_newest(self, known: int, newest: int) -> None:
        """Check that no values would be removed that were committed.

        Raises:
            Refusal: the first server has lost rounds.
        """
        if known > newest:
            raise Refusal(
                "state",
                f"it has values of round {known} of run {self.name!r}, which the first server does not know: that "
                "one has lost rounds; restore its folder (megatron-ext server recover rebuilds a lost journal), or "
                "begin a run under another name",
            )

    def _seal(self, wanted: Seal) -> Any:
        peer, instance, number = wanted.peer, wanted.instance, wanted.round
        with self.changes:
            self._await_word(lambda word: word.members.get(peer) == instance and word.open_round >= number)
        contribution = self._contribution(peer, instance, number)
        if contribution is None:
            return pb2.Sealed(missing=f"round {number} is over on {self._title}")
        missing = self._shard.missing(contribution, wanted.index, number)
        if missing is None:
            self._shard.spool.seal(peer, number, instance)
            self._failpoints.hit("upload_checked")
        return pb2.Sealed(missing=missing, frames=contribution.frames, bytes=contribution.nbytes)

    def _work(self, call: str, work: Work) -> Any:
        job = work.job
        with self.changes:
            self._tickets += 1
            ticket = self._tickets
            self._await_word(lambda word: bool(word.id) and word.open_round >= job.number)
        with self._working:
            # A call that was given up may still have waited here.
            if ticket != self._tickets or self._word.open_round != job.number or not self._shard.is_open:
                raise Refusal("later", f"round {job.number} is not what {self._title} makes now")
            decision = check_work(call, work, self.config, self._shard.catalog)
            try:
                if call == "measure":
                    return pb2.ShardReply(measure=measured_message(self._shard.measure(job)))
                if call == "common_squares":
                    return pb2.ShardReply(common_squares=squares_message(self._shard.common_squares(job, decision)))
                made = self._shard.write(job, decision)
                self._shard.publish()
                if self._copy is not None:
                    self._copy.put_snapshot(self._shard.snapshot_path(job.number))
                return pb2.ShardReply(write=made_message(made))
            except DamagedContribution as damaged:
                return pb2.ShardReply(damaged=damaged_message(damaged))

    # -----------------------------------------------------------------------------------------------------------
    # The end
    # -----------------------------------------------------------------------------------------------------------

    def try_to_rest(self) -> bool:
        """Return whether the first server ends, and nothing is lost for anyone when this one does."""
        with self.changes:
            return self._draining.is_over(self._word.open_round, self._word.members)

    # -----------------------------------------------------------------------------------------------------------
    # Helpers
    # -----------------------------------------------------------------------------------------------------------

    def _contribution(self, peer: str, instance: str, number: int) -> Contribution | None:
        """Return where a peer's frames go; None when they do not count any more."""
        with self.changes:
            self._check_caller(peer, instance)
            open_round = self._word.open_round
            if number > open_round:
                raise Refusal("state", f"round {number} is not open yet; the open one is {open_round}")
            counts = self._counts(self._word, peer, number)
            if counts is None:
                raise Refusal("later", f"what peer {peer!r} has contributed before is not used yet; try again")
            if not counts:
                return None
            self._draining.check(open_round)
            return self._shard.contribution(peer, number)

    def _counts(self, word: Word, peer: str, number: int) -> bool | None:
        """Return whether a member's contribution counts, or may still; None when another one's turn comes first."""
        open_round = word.open_round
        if open_round == 0 or not self.config.is_asynchronous:
            return bool(number == open_round)
        if peer in word.kept:
            return True if word.kept[peer] == number else None
        is_used = number <= (word.used.get(peer) or 0)
        return not is_used and not self.config.policy.is_stale(number, open_round)

    def _check_caller(self, peer: str, instance: str) -> None:
        """Check that a process speaks for a peer, as far as this shard knows.

        Raises:
            Refusal: it does not.
        """
        if not self._shard.is_open or self._word.members.get(peer) != instance:
            raise Refusal(
                "state", f"peer {peer!r} is not a member of the run, or another process has registered as it since"
            )

    def _await_word(self, fits: Callable[[Word], bool]) -> None:
        """Wait until the first server's word fits, or certainly does not; with the lock held.

        Raises:
            Refusal: it has not called.
        """
        heard, end = self._heard, time.monotonic() + WORD_SECONDS
        while not fits(self._word) and self._heard < heard + 2:
            if time.monotonic() > end:
                raise self._no_word()
            self.changes.wait(end - time.monotonic())

    def _no_word(self) -> Refusal:
        if self._refused:
            return Refusal("later", f"{self._title} cannot follow the first server: {self._refused}")
        return Refusal("later", f"{self._title} hears nothing of the first server, {self._server.shards[0]}")
