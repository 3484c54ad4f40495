# SPDX-License-Identifier: Apache-2.0
"""One run on the server: what peers and people ask of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.frames import Frame
from megatron_ext.sync_service.protocol.refusal import NameInUse, NotWhole, Refusal
from megatron_ext.sync_service.protocol.report import INTERVAL, Report
from megatron_ext.sync_service.protocol.resuming import Claim, ResumeAnswer
from megatron_ext.sync_service.rounds.changes import Changes
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.draining import Draining
from megatron_ext.sync_service.rounds.handshake import check_against, check_alone
from megatron_ext.sync_service.rounds.members import Admission, Member, RoundResult
from megatron_ext.sync_service.rounds.presence import Presence
from megatron_ext.sync_service.rounds.resume import decide
from megatron_ext.sync_service.rounds.round import Answer
from megatron_ext.sync_service.server.round_maker import RoundMaker
from megatron_ext.sync_service.server.status import overview_of, status_of
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.shards.remote import RemoteState
from megatron_ext.sync_service.shards.remote_shard import RemoteShard, ShardProblem
from megatron_ext.sync_service.shards.sharding import part_of
from megatron_ext.sync_service.shards.shards import Shards
from megatron_ext.sync_service.values.contribution import Contribution
from megatron_ext.sync_service.values.durable import described
from megatron_ext.sync_service.values.failpoints import Failpoints
from megatron_ext.sync_service.values.open_values import OpenValues
from megatron_ext.sync_service.values.receive import receive
from megatron_ext.sync_service.values.snapshot import Snapshot

__all__ = ["Run"]

log = logging.getLogger(__name__)

_LONGEST_REASON = 300
"""Letters of why a peer was evicted."""


class Run:
    """A run that is being served. Its methods may be called from several threads.

    Attributes:
        changes: the lock of everything, and what is waited for.
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
        self._unwritten = ""
        self.changes = Changes()
        self._draining = Draining()
        self._addresses = tuple(shard.server for shard in shards)
        self._store = RunStore(name, config, folder, keep_snapshots, remote, failpoints, shards=max(len(shards), 1))
        self._state = self._store.state
        self._presence = Presence()
        for member in self._state.members.values():
            # Of those who were alive when a former server ended, the next heartbeat tells.
            self._presence.begins(member.name, member.alive_seconds)
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
        self._maker = RoundMaker(config, self._store, self._shards, self.changes, failpoints, self._fail)

    # -----------------------------------------------------------------------------------------------------------
    # What peers ask for
    # -----------------------------------------------------------------------------------------------------------

    def register(
        self,
        peer: str,
        instance: str,
        *,
        config: dict[str, str],
        catalog: Catalog,
        index: int | None,
        peers: int | None,
        asynchronous: bool,
        sharded: bool,
        certificate: str | None = None,
        take_over: bool = False,
        alive_seconds: float = 0.0,
    ) -> Admission:
        """Make a peer a member.

        Args:
            peer: its name.
            instance: which process speaks for it.
            config: what must be the same for all peers, `codec` among it.
            catalog: the tensors.
            index: the place that it wants.
            peers: how many peers it believes there are.
            asynchronous: whether it can take part in asynchronous rounds.
            sharded: whether it can talk to several servers.
            certificate: whose certificate it has shown, if any.
            take_over: whether it takes the place of a process that is alive.
            alive_seconds: for how long it counts as alive after every word; 0 if it sends no heartbeats.

        Raises:
            NameInUse: another process speaks for the peer, and is alive.
            Refusal: it does not fit the run.
        """
        check_alone(self.config, config, catalog)  # may take long, for which nobody else waits
        with self._noting(), self.changes:
            self._draining.check(self._state.open_round)
            if peers not in (None, self.config.peers):
                raise Refusal("state", f"peers is {peers} at peer {peer!r} and {self.config.peers} in the run")
            if self.config.is_asynchronous and not asynchronous:
                raise Refusal(
                    "state", f"the run has asynchronous rounds, which peer {peer!r} does not know; update it"
                )
            if self._shards.others and not sharded:
                raise Refusal("state", f"the run has several servers, which peer {peer!r} does not know; update it")
            if self._shards.problem:
                raise Refusal("state" if self._shards.is_refused else "later", self._shards.problem)
            if lacking := self._shards.lacking(config["codec"]):
                raise Refusal("state", lacking)
            begins = self._begins_with(config, catalog)
            if not begins:
                own = {INTERVAL} if self.config.is_asynchronous else set()
                check_against(self._store.agreed, self._store.catalog, peer, config, catalog, own)
            self._check_certificate(peer, certificate)
            event = self._state.check_joining(peer, instance, index)
            until = self._presence.alive_until(peer)
            if event is not None and until is not None and not take_over and peer in self._state.members:
                raise NameInUse(self.name, peer, until)
            if begins:
                self._store.create(config, catalog)
            if event is not None:
                if peer not in self._state.uploaded:
                    # Another process may train from other values: what the former one has sent is not finished by it.
                    self._store.shard.spool.discard(peer)
                whose = {} if certificate is None else {"certificate": certificate}
                self._store.record({**event, **whose, "alive_seconds": alive_seconds})
                self.changes.notify_all()
            self._presence.heard(peer)
            self._presence.begins(peer, alive_seconds)
            return Admission(
                index=self._state.members[peer].index,
                open_round=self._state.open_round,
                shards=self._addresses,
                shard_of=self._store.shard_of if self._addresses else (),
            )

    def heartbeat(self, peer: str, instance: str, alive_seconds: float) -> None:
        """Note that a peer's process counts as alive for some seconds; for 0 that it does not any more.

        Raises:
            Refusal: it does not speak for the peer.
        """
        with self.changes:
            self._caller(peer, instance)
            self._presence.says(peer, alive_seconds)

    def check_caller(self, peer: str, instance: str) -> None:
        """Check that a process speaks for a peer.

        Raises:
            Refusal: it does not.
        """
        with self.changes:
            self._caller(peer, instance)

    def upload(self, peer: str, instance: str, number: int, frames: Iterable[Frame]) -> tuple[bool, int, int]:
        """Take frames of a contribution.

        Returns:
            Whether the round was closed before, and how many frames were taken, and how many were there already.

        Raises:
            Refusal: a frame or the caller is refused; the frames before it are kept.
            OSError: the disk refuses.
        """
        with self._noting():
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
            Refusal: the caller is refused.
            OSError: the disk refuses, or a shard does.
        """
        with self._noting():
            return self._commit(peer, instance, number, report)

    def _begins_with(self, config: dict[str, str], catalog: Catalog) -> bool:
        """Return whether what a peer brings is what the run becomes from now on.

        A peer with a wrong setting that left before there was a round must not stand in the way of the right ones.
        Other shards know the former tensors, so there it does.
        """
        if self._state.config is None:
            return True
        if not self._state.is_deserted or self._shards.others:
            return False
        return config != self._store.agreed or self._store.catalog.difference(catalog) is not None

    def _commit(self, peer: str, instance: str, number: int, report: Report) -> bool:
        if self.config.step_weights and number > 0 and not report.steps:
            raise Refusal("invalid", "step_weights of the run needs the steps of the interval; report them")
        contribution = self._contribution(peer, instance, number)
        if contribution is None:
            with self.changes:
                return not self._state.counts(peer, number)
        with self.changes:
            index = self._caller(peer, instance).index
        missing = self._store.shard.missing(contribution, index, number)
        if missing is not None:
            raise NotWhole(f"the contribution to round {number} is not whole: {missing}")
        missing, frames, nbytes = self._shards.seal(peer, instance, index, number)
        if missing is not None:
            raise NotWhole(f"the contribution to round {number} is not whole: {missing}")
        self._failpoints.hit("upload_checked")
        with self.changes:
            self._caller(peer, instance)
            if not self._accepts(peer, number):
                return not self._state.counts(peer, number)
            if peer not in self._state.uploaded:
                size = {"frames": contribution.frames + frames, "bytes": contribution.nbytes + nbytes}
                self._store.record({"event": "uploaded", "round": number, "peer": peer, **size, **report.as_json()})
                self._failpoints.hit("upload_journaled")
                self.changes.notify_all()
        return False

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
            self._caller(peer, instance)
            ledger = self._state.ledger(self.name, peer, self._store.shard.snapshots)
            return decide(ledger, claim), self._problem or self._shards.problem or self._state.waiting_for()

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
            self._caller(peer, instance)
            newest = self._state.newest
            if newest is None or number not in self._store.shard.snapshots:
                held = "none is committed yet" if newest is None else f"the newest is {newest.number}"
                raise Refusal("not_found", f"the values of round {number} are not here; {held}")
            self._state.adopted(peer, number)
            self._draining.begin_fetching(peer, number)
            self.changes.notify_all()
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
            self._caller(peer, instance)
            if number != self._state.open_round or number == 0 or self.config.is_asynchronous:
                return None
        return self._store.shard.open_values(number)

    def leave(self, peer: str, instance: str) -> None:
        """End a membership.

        Raises:
            Refusal: another process speaks for the peer by now.
        """
        with self.changes:
            if peer in self._state.members:
                self._caller(peer, instance)
                self._store.drop(peer, {"event": "left", "peer": peer})
                self.changes.notify_all()

    # -----------------------------------------------------------------------------------------------------------
    # What people ask for
    # -----------------------------------------------------------------------------------------------------------

    def evict(self, peer: str, reason: str) -> None:
        """End a membership against the peer's will; its process is refused from then on.

        Raises:
            Refusal: there is no such peer.
        """
        with self.changes:
            if peer not in self._state.members:
                names = ", ".join(self._state.members) or "none"
                raise Refusal("not_found", f"run {self.name!r} has no peer {peer!r}; its peers are: {names}")
            self._store.drop(peer, {"event": "evicted", "peer": peer, "reason": _printable(reason)})
            self.changes.notify_all()

    def status(self) -> dict[str, Any]:
        """Return what people want to know, as plain data."""
        with self.changes:
            return status_of(self.name, self.config, self._store, self._shards, self._problem, self._is_draining)

    def overview(self) -> dict[str, Any]:
        """Return the status with the history and the health of the run, as plain data."""
        with self.changes:
            return overview_of(self.name, self.config, self._store, self._shards, self._problem, self._is_draining)

    def drain(self) -> str:
        """Take no new members, and begin no round after the one for which contributions are there.

        Returns:
            What is waited for, in words.
        """
        with self.changes:
            under_way = self._state.uploaded or self._state.closing is not None
            self._draining.begin(self._state.open_round if under_way else self._state.open_round - 1)
            awaited = self._drained_after()
            log.info("run %s: draining; %s", self.name, awaited)
            return awaited

    def _drained_after(self) -> str:
        """Return in words what is waited for before the server ends."""
        last = self._draining.last_round
        assert last is not None
        if self._state.open_round <= last:
            unknown = [peer for peer in self._state.awaited() if not self._presence.is_known(peer)]
            if not unknown:
                return self._state.waiting_for()
            return (
                f"{self._state.waiting_for()}; no heartbeats say whether {', '.join(unknown)} will come: evict whoever "
                "will not, or end the server as it is (SIGTERM), which loses nothing either"
            )
        lacking = ", ".join(self._draining.lacking(self._state.members))
        if last < 0 or not lacking:
            return "no round is under way"
        return f"no round is under way; {lacking} may still fetch round {last}"

    @property
    def _is_draining(self) -> bool:
        return self._draining.last_round is not None

    def try_to_rest(self) -> bool:
        """Return whether nothing is lost for anyone when the server ends now, or nothing comes any more.

        Where all who are awaited in the last round are gone, the round before becomes the last one.
        """
        with self.changes:
            if self._stopped_by or self._draining.is_over(self._state.open_round, self._state.members):
                return True
            awaited = self._state.awaited()
            is_stuck = self._state.closing is None and self._state.seconds_until_close(time.monotonic()) is None
            if not (is_stuck and self._draining.is_given_up(self._state.open_round, awaited, self._presence)):
                return False
            log.warning(
                "run %s: %s, and nothing is heard of %s: the round stays open, with what was uploaded for it",
                *(self.name, self._state.waiting_for(), ", ".join(awaited) or "further peers"),
            )
            # Other servers of the run end, too.
            self._draining.begin(self._state.open_round - 1)
            self.changes.notify_all()
            return True

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

    # -----------------------------------------------------------------------------------------------------------
    # Helpers, to be called with the lock held
    # -----------------------------------------------------------------------------------------------------------

    def _caller(self, peer: str, instance: str) -> Member:
        """Return the member that calls, and note that it did.

        Raises:
            Refusal: the caller is refused.
        """
        member = self._state.check_caller(peer, instance)
        self._store.history.seen(peer, time.time())
        self._presence.heard(peer)
        return member

    def _check_certificate(self, peer: str, certificate: str | None) -> None:
        """Check that a peer's name belongs to whoever calls: to the certificate that was the first to register it.

        Raises:
            Refusal: it belongs to another one.
        """
        owner = self._state.certificates.get(peer)
        if certificate is not None and owner not in (None, certificate):
            raise Refusal(
                "denied",
                f"the name of peer {peer!r} belongs to the certificate of {owner!r}, and this call shows that of "
                f"{certificate!r}; give a peer name of its own, or let an operator evict {peer!r}, which frees it",
            )

    def _contribution(self, peer: str, instance: str, number: int) -> Contribution | None:
        """Return where a peer's frames go; None when they do not count any more."""
        with self.changes:
            self._caller(peer, instance)
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
        self._caller(peer, instance)
        answer, reason = self._state.answer(peer, number, uploaded)
        return answer, self._problem or self._shards.problem or reason if answer == "waiting" else reason

    @property
    def _problem(self) -> str:
        """Why the open round cannot be made; empty when it can."""
        return self._stopped_by or self._maker.problem or self._unwritten

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Say in the log, and in the status until something can be written again, what a peer could not write."""
        try:
            yield
        except ShardProblem:
            raise  # its status says so
        except OSError as error:
            said, self._unwritten = self._unwritten, f"what peers send cannot be written: {described(error)}"
            if said != self._unwritten:
                log.error("run %s: %s", self.name, self._unwritten)
            raise
        self._unwritten = ""

    def _word(self) -> dict[str, Any]:
        """Return what other servers have to know of the run that have parts of its values."""
        state = self._state
        return {
            "shards": list(self._addresses),
            "config": asdict(self.config),
            "id": self._store.run_id,
            "open_round": state.open_round,
            "members": {member.name: member.instance for member in state.members.values()},
            # Contributions that count, whoever speaks for their peers by now, by the rounds that they were made for.
            "kept": {peer: state.made_for(peer) for peer in {*state.uploaded, *(state.closing or ())}},
            # For which rounds members have contributed before, where rounds are asynchronous.
            "used": {peer: state.contributed(peer) for peer in state.members} if self.config.is_asynchronous else {},
            "last_round": self._draining.last_round,
        }

    def _catalog_of(self, shard: int) -> dict[str, Any]:
        """Return what they have to know once."""
        part = part_of(self._store.catalog, self._store.shard_of, shard)
        return {"catalog": part.as_json(), "codec": self._store.shard.codec}


def _printable(text: str) -> str:
    """Return what people have written as one line of limited length, without what a terminal would obey."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."
