# SPDX-License-Identifier: Apache-2.0
"""One run on the server: what peers and people ask of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.frames import Frame
from megatron_ext.sync_service.protocol.refusal import NotWhole, Refusal
from megatron_ext.sync_service.protocol.report import Report
from megatron_ext.sync_service.protocol.resuming import Adopt, Claim, Continue, ResumeAnswer
from megatron_ext.sync_service.rounds.changes import Changes
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.draining import Draining
from megatron_ext.sync_service.rounds.members import RoundResult
from megatron_ext.sync_service.rounds.presence import Presence
from megatron_ext.sync_service.rounds.resume import decide
from megatron_ext.sync_service.rounds.round import Answer
from megatron_ext.sync_service.server.admissions import Admissions
from megatron_ext.sync_service.server.resting import Resting
from megatron_ext.sync_service.server.round_maker import RoundMaker
from megatron_ext.sync_service.server.status import overview_of, status_of
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.server.unwritten import Unwritten
from megatron_ext.sync_service.shards.remote import RemoteState
from megatron_ext.sync_service.shards.remote_shard import RemoteShard
from megatron_ext.sync_service.shards.shard_calls import Word
from megatron_ext.sync_service.shards.sharding import part_of
from megatron_ext.sync_service.shards.shards import Shards
from megatron_ext.sync_service.values.contribution import Contribution
from megatron_ext.sync_service.values.failpoints import Failpoints
from megatron_ext.sync_service.values.open_values import OpenValues
from megatron_ext.sync_service.values.receive import receive

__all__ = ["Run"]

log = logging.getLogger(__name__)

_LONGEST_REASON = 300
"""Letters of why a peer was evicted."""


class Run:
    """A run that is being served. Its methods may be called from several threads.

    Attributes:
        changes: the lock of everything, and what is waited for.
        admissions: who is a member.
        resting: what draining the server does to it.
    """

    def __init__(
        self,
        name: str,
        config: RunConfig,
        folder: Path,
        *,
        keep_snapshots: int,
        remote: RemoteState | None = None,
        shards: Sequence[ConnectionConfig] = (),
        failpoints: Failpoints,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Open the run's folder and resume from what is there.

        Args:
            name: the run id.
            config: of the run.
            folder: where its state is; made when it is not there.
            keep_snapshots: how many committed rounds stay on the disk.
            remote: a copy of its state elsewhere.
            shards: where the values are when several servers have them, this one first.
            failpoints: where to die in tests.
            on_fatal: called with what has ended one of the run's threads, after which it makes no round any more.

        Raises:
            UserError: the state is damaged or was made with another configuration.
        """
        self.name = name
        self.config = config
        self._failpoints = failpoints
        self._on_fatal = on_fatal
        self._stopped_by = ""
        self._unwritten = Unwritten(name)
        self.changes = Changes()
        self._draining = Draining()
        self._addresses = tuple(shard.server for shard in shards)
        self._store = RunStore(name, config, folder, keep_snapshots, remote, failpoints, shards=max(len(shards), 1))
        self._state = self._store.state
        self._presence = presence = Presence()
        self._shards = Shards(
            self._store.shard,
            [
                RemoteShard(number, name, shard, self.changes, self._word, self._catalog_of, self._fail)
                for number, shard in enumerate(shards)
                if number > 0
            ],
        )
        steps = config.sync_steps or 1
        if config.merge_interval is not None and config.merge_interval % steps:
            every = math.lcm(config.merge_interval, steps)
            log.warning(
                "run %s: merge_interval is %d and sync_steps %d, so experts are merged every %d steps",
                *(name, config.merge_interval, steps, every),
            )
        self.admissions = Admissions(
            name,
            config,
            self._addresses,
            store=self._store,
            shards=self._shards,
            draining=self._draining,
            presence=presence,
            changes=self.changes,
        )
        self.resting = Resting(name, self._state, self._draining, presence, self.changes)
        self._maker = RoundMaker(
            name, config, self._store, self._shards, presence, self.changes, failpoints, self._fail
        )

    # -----------------------------------------------------------------------------------------------------------
    # What peers ask for
    # -----------------------------------------------------------------------------------------------------------

    def check_caller(self, peer: str, instance: str) -> None:
        """Check that a process speaks for a peer.

        Raises:
            Refusal: it does not.
        """
        with self.changes:
            self.admissions.caller(peer, instance)

    def upload(self, peer: str, instance: str, number: int, frames: Iterable[Frame]) -> tuple[bool, int, int]:
        """Take frames of a contribution.

        Returns:
            Whether the round was closed before, and how many frames were taken, and how many were there already.

        Raises:
            Refusal: a frame or the caller is refused; the frames before it are kept.
            OSError: the disk refuses.
        """
        with self._unwritten.noting():
            return receive(lambda: self._contribution(peer, instance, number), frames, self._failpoints)

    def commit(self, peer: str, instance: str, number: int, report: Report) -> bool:
        """Count a contribution as whole.

        Args:
            peer: whose it is.
            instance: which process speaks for it.
            number: the round.
            report: what the peer says of its interval.

        Returns:
            Whether the round was closed before.

        Raises:
            NotWhole: it is not whole, perhaps because a former server had the rest.
            Refusal: the caller is refused, or a shard does not go along.
            OSError: the disk refuses, or a shard does.
        """
        if self._shards.problem:  # rather than wait for it: the peer's log is where its operator looks
            raise Refusal("later", self._shards.problem)
        with self._unwritten.noting():
            return self._commit(peer, instance, number, report)

    def _commit(self, peer: str, instance: str, number: int, report: Report) -> bool:
        if number > 0:
            self._check_work(report)
        contribution = self._contribution(peer, instance, number)
        if contribution is None:
            with self.changes:
                return not self._state.counts(peer, number)
        with self.changes:
            index = self.admissions.caller(peer, instance).index
        missing = self._store.shard.missing(contribution, index, number)
        if missing is not None:
            raise NotWhole(f"the contribution to round {number} is not whole: {missing}")
        missing, frames, nbytes = self._shards.seal(peer, instance, index, number)
        if missing is not None:
            raise NotWhole(f"the contribution to round {number} is not whole: {missing}")
        self._failpoints.hit("upload_checked")
        with self.changes:
            self.admissions.caller(peer, instance)
            if not self._accepts(peer, number):
                return not self._state.counts(peer, number)
            if peer not in self._state.uploaded:
                size = {"frames": contribution.frames + frames, "bytes": contribution.nbytes + nbytes}
                self._store.record({"event": "uploaded", "round": number, "peer": peer, **size, **report.as_json()})
                self._failpoints.hit("upload_journaled")
                self.changes.notify_threads()
        return False

    def _check_work(self, report: Report) -> None:
        """Check that a peer says by what its contribution is weighted.

        Raises:
            Refusal: it does not.
        """
        if self.config.step_weights and not report.steps:
            raise Refusal("invalid", "step_weights of the run needs the steps of the interval; report them")
        batch = 0 if report.progress is None else report.progress.batch
        if self.config.token_weights and not (report.steps and batch):
            raise Refusal(
                "invalid",
                "token_weights of the run needs the steps of the interval and the samples of a step (progress.batch); "
                "report both",
            )

    def look(self, peer: str, instance: str, number: int, *, uploaded: bool) -> Answer:
        """Return what a peer that awaits a round is to do as things are; `changes` may make it another answer.

        Raises:
            Refusal: the caller is refused.
        """
        with self.changes:
            return self._answer(peer, instance, number, uploaded)

    async def hear(self, peer: str, instance: str, least: int) -> None:
        """Nothing has to be waited for: this server knows who its members are."""

    def resume(self, peer: str, instance: str, claim: Claim) -> tuple[ResumeAnswer, str]:
        """Return where a peer resumes as things are, and in words what the open round waits for.

        Raises:
            Refusal: the caller is refused.
        """
        with self.changes:
            self.admissions.caller(peer, instance)
            ledger = self._state.ledger(self.name, peer, self._store.shard.snapshots)
            answer = decide(ledger, claim)
            if isinstance(answer, Continue | Adopt):
                self._state.adopted(peer, answer.round)
            return answer, self._problem or self._shards.problem or self._state.waiting_for()

    def result(self, peer: str, number: int) -> tuple[RoundResult, RoundResult | None]:
        """Return from which round a peer continues that has contributed, and what became of its contribution.

        Args:
            peer: its name.
            number: the round that the contribution was made for.

        Returns:
            The newest round; where rounds are asynchronous that of the peer's contribution, while its values are kept.
            Besides, the contribution's round when it is remembered.

        Raises:
            Refusal: there is no round yet.
        """
        with self.changes:
            newest, used = self._state.newest, self._state.outcome(peer, number)
            if newest is None:
                raise Refusal("not_found", "no round has been committed yet")
            own = used if self.config.is_asynchronous and number > 0 else None  # who published continues like all
            # What began with values that are too old would not count.
            is_of_use = own is not None and not self._state.policy.is_stale(own.number + 1, self._state.open_round)
            return own if own and is_of_use and own.number in self._store.shard.snapshots else newest, used

    @property
    def codec(self) -> str:
        """In which updates travel."""
        return self._store.shard.result_codec

    @contextmanager
    def snapshot(self, peer: str, instance: str, number: int) -> Iterator[tuple[Snapshot, Catalog]]:
        """Yield the values of a committed round, for a stream to a peer that continues from them.

        Raises:
            Refusal: they are not there (any more), or the caller is refused.
        """
        with self.changes:
            self.admissions.caller(peer, instance)
            newest = self._state.newest
            if newest is None or number not in self._store.shard.snapshots:
                held = "none is committed yet" if newest is None else f"the newest is {newest.number}"
                raise Refusal("not_found", f"the values of round {number} are not here; {held}")
            self._state.adopted(peer, number)
            self._draining.begin_fetching(peer, number)
            self.changes.notify_threads()
            reading = ExitStack()
            found = reading.enter_context(self._store.shard.snapshots[number].reading())
            catalog = self._store.shard.catalog
        try:
            with reading:
                yield found, catalog
        finally:
            with self.changes:
                self._draining.end_fetching()

    def open_values(self, peer: str, instance: str, number: int) -> OpenValues | None:
        """Return what is known of the open round's values; None when it is another one, or no round awaits others.

        Raises:
            Refusal: the caller is refused.
        """
        with self.changes:
            self.admissions.caller(peer, instance)
            if number != self._state.open_round or number == 0 or self.config.is_asynchronous:
                return None
        return self._store.shard.open_values(number)

    # -----------------------------------------------------------------------------------------------------------
    # What people ask for
    # -----------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what people want to know, as plain data."""
        with self.changes:
            return status_of(*self._described())

    def overview(self) -> dict[str, Any]:
        """Return the status with the history and the health of the run, as plain data."""
        with self.changes:
            return overview_of(*self._described())

    def _described(self) -> tuple[str, RunConfig, RunStore, Shards, str, str, bool]:
        silent = self._presence.told(self._state.members)
        return self.name, self.config, self._store, self._shards, self._problem, silent, self.resting.is_draining

    def try_to_rest(self) -> bool:
        """Return whether nothing is lost for anyone when the server ends now, or nothing comes any more."""
        return bool(self._stopped_by) or self.resting.try_to_rest()

    def stop(self) -> None:
        """End the threads."""
        self._maker.stop()
        self._shards.stop()
        self._store.close()

    def _fail(self, error: BaseException) -> None:
        """Make no round any more. Peers wait, are told why, and continue when the server has been started again."""
        log.critical("run %s has stopped", self.name, exc_info=error)
        with self.changes:
            self._stopped_by = (
                f"the run has stopped at round {self._state.open_round} ({type(error).__name__}: {error}); when its "
                "cause is fixed (the server's log has more), start the server again"
            )
            self.changes.notify_all()
        self._on_fatal(error)

    def _contribution(self, peer: str, instance: str, number: int) -> Contribution | None:
        """Return where a peer's frames go; None when they do not count any more."""
        with self.changes:
            self.admissions.caller(peer, instance)
            if not self._accepts(peer, number):
                return None
            self._draining.check(self._state.open_round)
            return self._store.shard.contribution(peer, number)

    def _accepts(self, peer: str, number: int) -> bool:
        """Return whether a contribution may still come in; note it when it has become too old."""
        if self._state.accepts(peer, number):
            return True
        event = self._state.stale_event(peer, number)
        if event is not None:
            self._store.record(event)
            self._store.shard.spool.discard(peer)
        return False

    def _answer(self, peer: str, instance: str, number: int, uploaded: bool) -> Answer:
        self.admissions.caller(peer, instance)
        answer, reason = self._state.answer(peer, number, uploaded)
        if answer == "committed":
            # From here on, and not only once it has the values: the next round must not close meanwhile.
            self._state.adopted(peer, self._state.open_round - 1)
        if answer != "waiting":
            return answer, reason
        silent = self._presence.told(self._state.awaited())
        return answer, self._problem or self._shards.problem or "; ".join(filter(None, (reason, silent)))

    @property
    def _problem(self) -> str:
        """Why the open round cannot be made; empty when it can."""
        return self._stopped_by or self._maker.problem or self._unwritten.problem

    def _word(self) -> Word:
        """Return what other servers have to know of the run that have parts of its values."""
        state = self._state
        used = {peer: state.contributed(peer) for peer in state.members} if self.config.is_asynchronous else {}
        return Word(
            shards=self._addresses,
            config=asdict(self.config),
            id=self._store.run_id,
            open_round=state.open_round,
            members={member.name: member.instance for member in state.members.values()},
            kept={peer: state.made_for(peer) for peer in {*state.uploaded, *(state.closing or ())}},
            used={peer: number for peer, number in used.items() if number is not None},
            last_round=self._draining.last_round,
        )

    def _catalog_of(self, shard: int) -> tuple[Catalog, str]:
        """Return what they have to know once: their tensors, and in which codec contributions travel."""
        return part_of(self._store.catalog, self._store.shard_of, shard), self._store.shard.codec
