# SPDX-License-Identifier: Apache-2.0
"""A peer's side of the sync service.

client = SyncClient(ClientConfig(connection=..., run="demo", peer="peer-0"), values)
values = client.start(values)              # everybody begins with the same values
for every interval:
    ...                                    # train
    values = client.sync(values).values    # all peers' values, made one
client.leave()

A peer may be a job of several processes that each hold parts of the tensors. Then all of them call all methods
together, with the values of their parts: each moves its own, and the first one speaks for the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection
from megatron_ext.sync_service.channel.route import Route
from megatron_ext.sync_service.peer.ahead import Ahead, Taken
from megatron_ext.sync_service.peer.config import ClientConfig
from megatron_ext.sync_service.peer.download import download
from megatron_ext.sync_service.peer.job import Job, OneProcess
from megatron_ext.sync_service.peer.membership import Answer, Membership
from megatron_ext.sync_service.peer.outcome import RoundOutcome
from megatron_ext.sync_service.peer.outgoing import Outgoing
from megatron_ext.sync_service.peer.parts import Part, Values, checked_memory, whole_parts
from megatron_ext.sync_service.peer.upload import upload
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.report import Progress, Report
from megatron_ext.sync_service.protocol.round_digest import RoundDigest

__all__ = ["ClientConfig", "Report", "RoundOutcome", "SyncClient", "Values"]

log = logging.getLogger(__name__)

Frozen = Callable[[str], torch.Tensor | None]
"""Returns the values of a part that a peer does not train, given its key; None where they are not at hand."""

_UPLOADS = 3
"""How many times a contribution is uploaded when servers lose it meanwhile."""


class SyncClient:
    """A peer, or one process of it. Not for several threads at once, but for `abandon`."""

    def __init__(
        self,
        config: ClientConfig,
        catalog: Catalog | Values,
        *,
        job: Job | None = None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        """Prepare; nothing is sent before `register`.

        Args:
            config: of the peer.
            catalog: the tensors that the peers have in common, or values to take it from.
            job: the processes of the peer; this one alone unless given.
            parts: what this process holds: every tensor as a whole, which it is called after, unless given. Of all
                primary parts of a job every element of every tensor is in one.

        Raises:
            UserError: the configuration or the catalog cannot be used.
        """
        config.check()
        try:
            self.catalog = catalog if isinstance(catalog, Catalog) else Catalog.of_tensors(catalog)
        except Refusal as refusal:
            raise UserError(f"catalog: {refusal}") from refusal
        self.config = config
        self.parts = whole_parts(self.catalog) if parts is None else tuple(parts)
        self._job = OneProcess() if job is None else job
        self.index = -1
        self.peers = 0
        self.round = -1
        self.digest = ""
        self.uploaded = False
        self.counted: Progress | None = None
        self.asynchronous = False
        self._contributed: int | None = None
        self._pending: Progress | None = None
        self._sent = -1
        self._report = Report()
        self._outgoing = Outgoing(self.parts, config.codec, config.frame_bytes)
        self._looks_ahead = False
        self._out: Values = {}
        self._ahead: Ahead | None = None
        self._job.on_all(self._connect)
        self._membership = Membership(config, self._connection, self._job)
        self._pool = ThreadPoolExecutor(config.streams)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the membership stays, in which another process may follow."""
        self.rest()
        self._membership.rest()
        self._pool.shutdown()

    def rest(self) -> None:
        """Close the connections until the next call."""
        self._take_ahead(-1)
        self._route.close()

    def abandon(self) -> None:
        """Let what another thread does with this client end soon, with a UserError; there is no way back."""
        self._membership.rest()
        self._route.abandon()

    def register(self) -> int:
        """Become a member of the run.

        Returns:
            The open round; 0 when the common start is awaited. `index` and `peers` say which part of the data is this
            peer's, `uploaded` whether an earlier process of it has contributed to the open round.

        Raises:
            UserError: the server refuses, naming what does not fit.
        """
        registered = self._membership.register(self.catalog)
        self.index, self.peers, self.uploaded = registered.index, registered.peers, registered.uploaded
        self.asynchronous, self._contributed = registered.asynchronous, registered.contributed
        self._pending = registered.pending
        self._outgoing.sends_gradients |= registered.asynchronous
        self._looks_ahead = registered.looks_ahead
        self._job.on_all(lambda: self._route.lead(registered.shards, self.catalog, registered.shard_of))
        return registered.open_round

    def start(
        self, values: Values, *, repeats: bool = True, ends: Progress | None = None
    ) -> dict[str, torch.Tensor]:
        """Register, and return the values that everybody goes on from.

        They are those of the newest round. At the beginning of a run there is none yet, and one peer, whom the server
        chooses, publishes its own.

        Args:
            values: this peer's.
            repeats: whether this process makes again, exactly, the run's first interval of which an earlier one has
                contributed to the open round, before it asks for that. Otherwise the round is awaited here.
            ends: how far this peer's training is at the end of its first interval. That of an earlier process was
                another one if it ended elsewhere.

        Raises:
            UserError: the server refuses, or nobody publishes.
        """
        open_round = self.register()
        if self.asynchronous:
            if self._contributed:
                self._await_pending(self._contributed)
            return self._adopt(self._await(0, values))
        # After the first interval nobody knows which one was contributed.
        repeats = repeats and open_round == 1 and (None in (ends, self._pending) or ends == self._pending)
        if self.uploaded and open_round > 0 and not repeats:
            answer = self._await_pending(open_round)
            if answer is not None:
                return self._adopt(answer)
        was_uploaded = self.uploaded
        adopted = self._adopt(self._await(0, values))
        # What an earlier process of this peer has contributed to the open round counts; it is not sent twice.
        self.uploaded = was_uploaded and open_round == self.round + 1
        return adopted

    def resume(
        self, number: int, digest: str = "", *, repeats: bool = True, begun: Progress | None = None
    ) -> dict[str, torch.Tensor] | None:
        """Register, and go on in the middle of the interval after a round whose values this peer has taken before.

        `residuals` are to be set before, as they were after that round. They are dropped when an earlier process of
        this peer has sent them already, in a contribution that counts and that this one does not make again.

        Args:
            number: the round.
            digest: of its values, as `digest` was after it; not compared when empty.
            repeats: whether this process makes the rest of the interval exactly as an earlier one has. What that has
                contributed to the open round is awaited otherwise.
            begun: how far this peer's training was when the interval began. Where rounds are asynchronous, another
                peer may have had its place since, and gone on in its part of the samples.

        Returns:
            The values of the newest round if that is a later one, or of the open one once it is made, where what an
            earlier process of this peer has contributed to it counts. None if it is this one. Where
            rounds are asynchronous an interval is lost only when the server has no longer the values that it began
            with, or counts already what an earlier process of this peer, or another one in its place, has made of it.

        Raises:
            UserError: the server refuses, knows nothing of the round yet, or has other values in it.
        """
        open_round = self.register()
        if open_round <= number:
            last = open_round - 1 if open_round else "none"
            raise UserError(
                f"this peer goes on from round {number}, but the newest one of run {self.config.run!r} on the server "
                f"is {last}: the server has lost rounds, or is another one; restore its folder, or begin a run under "
                "another name"
            )
        if self.asynchronous:
            return self._resume_alone(number, digest, begun)
        lossy = self.config.codec != "fp32"
        if open_round > number + 1:
            log.warning("round %d is over; this peer goes on from the newest one", number + 1)
        newest = open_round - 1
        if self.uploaded and (newest > number or not repeats) and self._await_pending(open_round) is not None:
            # What an earlier process has contributed to the open round counts; this one does not make it again.
            newest = open_round
        if newest > number:
            for over in range(number + 1, newest + 1):
                answer = self._await(over, {})
                if self._drop_paid(answer) or not lossy:
                    break  # nothing is owed, so that no other round has to be asked about
            return self._adopt(answer)
        was_uploaded = self.uploaded
        answer = self._await(number, {})
        self._check_history(number, digest, answer)
        if lossy:
            taken = self._adopt(answer)
            if self.round != number:
                if was_uploaded:
                    self._drop_paid(self._await(number + 1, {}))
                return taken
        self.round, self.uploaded = number, was_uploaded
        self.digest = answer.digest if answer.newest == number else digest
        if was_uploaded:
            # What was sent is made again now, from the same state: what it has lost can be worked out.
            self._sent = number + 1
        return None

    def _drop_paid(self, answer: Answer) -> bool:
        """Drop what is owed of the parts in which a contribution of an earlier process has counted.

        Returns:
            Whether no process of the job owes anything any more, which all of them say alike.
        """
        # A round that the server has forgotten has neither: this peer has rather gone on since.
        is_forgotten = not (answer.contributors or answer.message)
        if answer.contributed or is_forgotten:
            self._outgoing.owe_no_more(answer.excluded)
        return (answer.contributed or is_forgotten) and not answer.excluded

    def _check_history(self, number: int, digest: str, answer: Answer) -> None:
        """Check that a round that this peer went on from is the server's newest one, if they have one number."""
        if digest and answer.newest == number and answer.digest != digest:
            raise UserError(
                f"this peer goes on from values of round {number} with the digest {digest}, but those of run "
                f"{self.config.run!r} on the server have {answer.digest}: the server's folder is an older copy, after "
                "which rounds were made anew, or another run's; start this peer with --no-load-optim, which takes the "
                "server's values, or begin a run under another name"
            )

    def _resume_alone(self, number: int, digest: str, begun: Progress | None) -> dict[str, torch.Tensor] | None:
        """Go on in the middle of an interval while others make rounds."""
        while self._contributed is not None and self._contributed > number:
            # What an earlier process has made of the interval counts; it is not made twice.
            answer = self._await_pending(self._contributed)
            if answer is not None:
                log.warning("what this peer has made after round %d is judged already; it goes on from there", number)
                if self._contributed == number + 1:
                    self._drop_paid(answer)
                else:
                    self.residuals = {}  # the server does not remember those before, of which some have counted
                return self._adopt(answer)
            self.register()  # what there was before the lost one
        self.uploaded = False
        answer = self._await(number + 1, {}, again=True)
        self._check_history(number, digest, answer)
        if begun is not None and answer.counted is not None and answer.counted.samples > begun.samples:
            log.warning("another peer has gone on in this one's place since round %d; it goes on from there", number)
            return self._adopt(self._await(0, {}))
        taken = self._adopt(answer)
        if self.round == number:
            return None
        log.warning("round %d is no longer kept; this peer goes on from round %d", number, self.round)
        return taken

    def sync(
        self,
        values: Values,
        report: Report | None = None,
        frozen: Frozen = lambda key: None,
        out: Values | None = None,
    ) -> RoundOutcome:
        """Make a round: upload, wait for the others, download.

        Args:
            values: after this peer's interval; at least those that it trains.
            report: what there is to say of the interval; the first process's counts.
            frozen: returns the values of a part that this peer does not train, given its key, if they are at hand
                exactly as the last round had them.
            out: memory for the round's values, by the parts' keys, such as an earlier round's that are not needed any
                more: fresh memory is slow. Not that of `values`.

        Raises:
            UserError: the server refuses, the round does not come, or values or memory have not the catalog's shapes.
        """
        number = self.round + 1
        self._out = checked_memory(self.parts, out or {}, values)
        # What an earlier process has uploaded may be wanted again.
        self._report = report or Report()
        self._route.take_traffic()  # of the start
        try:
            if not self.uploaded:
                self.upload(number, values)
            return self.fetch(number, values, frozen)
        except BaseException:  # Ctrl-C too; raised again
            self._take_ahead(-1)  # nothing is written into the memory any more
            raise

    def upload(self, number: int, values: Values, report: Report | None = None) -> bool:
        """Upload and commit a contribution.

        Args:
            number: the round.
            values: what is contributed.
            report: what there is to say of the interval; the last one again unless given.

        Returns:
            Whether it came in time.

        Raises:
            UserError: as for `sync`.
        """
        if report is not None:
            self._report = report
        for _ in range(_UPLOADS):
            closed, missing = any(self._job.on_all(lambda: self._upload(number, values))), ""
            if not closed:
                closed, missing = self._membership.commit(number, self._report)
            if not missing:
                break
            # A server that goes on elsewhere has the rounds, and not what was uploaded since.
            log.warning("%s; uploading it again", missing)
        else:
            raise UserError(f"{missing}, though it was uploaded {_UPLOADS} times")
        self.uploaded = not closed
        self._sent = number
        return not closed

    def fetch(self, number: int, values: Values, frozen: Frozen = lambda key: None) -> RoundOutcome:
        """Wait for a round and take its values.

        Args:
            number: the round.
            values: what was uploaded, should it be wanted again.
            frozen: as for `sync`.

        Raises:
            UserError: as for `sync`.
        """
        was_sent = self._sent == number
        # Worked out while the server has something to do, and of no use should the contribution not count.
        settled = self._outgoing.settle(number, self.index, values) if was_sent else None
        answer = self._await(number, values)
        expected: dict[str, torch.Tensor] = {}
        if answer.contributed and settled is not None:
            expected = dict(settled.owned) if answer.newest == number else {}
            self._outgoing.owe(settled, answer.excluded)
        elif not answer.contributed:
            log.warning("round %d did not count this peer's contribution: %s", number, answer.message or "it was late")
        if answer.newest == self.round + 1:
            expected |= self._kept(answer.kept, frozen)
        adopted = self._adopt(answer, expected)
        self._out = {}
        traffic = self._job.on_all(self._route.take_traffic)
        return RoundOutcome(
            number=self.round,
            values=adopted,
            contributed=answer.contributed,
            contributors=answer.contributors,
            message=answer.message,
            excluded=answer.excluded,
            sent=sum(sent for sent, _ in traffic),
            received=sum(received for _, received in traffic),
        )

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """What this process's contributions have lost so far, by part, 1-D; belongs into the peer's checkpoints.

        It is copied when it is read, and when it is set.
        """
        return {key: residual.clone() for key, residual in self._outgoing.residuals.items()}

    @residuals.setter
    def residuals(self, residuals: dict[str, torch.Tensor]) -> None:
        self._outgoing.residuals = {key: residual.clone() for key, residual in residuals.items()}

    def leave(self) -> None:
        """End the membership; what was committed counts."""
        self._membership.leave()

    def _connect(self) -> None:
        self._connection = Connection(self.config.connection)
        self._route = Route(self._connection)

    def _kept(self, places: frozenset[int], frozen: Frozen) -> dict[str, torch.Tensor]:
        """Return the last round's values of the parts that the next one leaves as they are, as far as they are here."""
        names = {spec.name for place, spec in enumerate(self.catalog) if place in places}
        anchors, found = self._outgoing.anchors, {}
        for part in self.parts if names else ():
            if part.spec.name in names and not part.spec.is_trained_by(self.index):
                value = anchors.get(part.key) if anchors else frozen(part.key)
                if value is not None:
                    found[part.key] = value
        return found

    def _take_ahead(self, number: int) -> Taken:
        """Take no more of the open round before it is made; return what there is, if it is this one."""
        ahead, self._ahead = self._ahead, None
        taken = Taken() if ahead is None else ahead.end()
        return taken if ahead is not None and ahead.number == number else Taken()

    def _upload(self, number: int, values: Values) -> bool:
        """Upload this process's share; return whether the round was closed before."""
        if self._looks_ahead and self._ahead is None and number == self.round + 1 > 0:
            before = self._outgoing.anchors
            caller = self._membership.caller
            self._ahead = Ahead(self._route, caller, self.parts, number, self.index, before, self._out)
        return upload(
            self._route,
            self._pool,
            self._membership.caller,
            self._outgoing,
            number,
            values,
            index=self.index,
            call_bytes=self.config.call_bytes,
        )

    def _await(self, number: int, values: Values, *, again: bool = False) -> Answer:
        """Return the answer that a round is committed, after doing what is wanted for it.

        Args:
            number: the round.
            values: what is uploaded should it be wanted.
            again: whether to go on from the values of the round before, if they are kept and rounds do not wait.
        """
        end = time.monotonic() + self.config.round_seconds
        while True:
            answer = self._ask(number, uploaded=self.uploaded, end=end, again=again)
            if answer.is_committed:
                return answer
            if answer.wants_upload:
                self.upload(number, values)

    def _await_pending(self, number: int) -> Answer | None:
        """Return the answer that a round is committed to which an earlier process has contributed.

        None when a server has lost that contribution, which this process cannot make again.
        """
        end = time.monotonic() + self.config.round_seconds
        answer = self._ask(number, uploaded=True, end=end)
        if answer.is_committed:
            return answer
        log.warning("what an earlier process had contributed to round %d is lost", number)
        self.uploaded = False
        return None

    def _ask(self, number: int, *, uploaded: bool, end: float, again: bool = False) -> Answer:
        """Ask the server, and note up to where this peer's training counts."""
        answer = self._membership.ask(number, uploaded=uploaded, end=end, again=again)
        if answer.is_committed:
            self.counted = answer.counted
        return answer

    def _adopt(self, answer: Answer, expected: Values | None = None) -> dict[str, torch.Tensor]:
        """Download the newest round that an answer speaks of, and go on from it.

        Args:
            answer: of the server.
            expected: what some parts should be in that round, which are then not sent.
        """
        taken: dict[str, torch.Tensor] = {}
        for _ in range(3):
            number = answer.newest
            results = self._job.on_all(partial(self._take, number, taken, expected))
            failed = [text for text, _, _ in results if text]
            if failed:
                # Rounds went on meanwhile, and this one is no longer kept.
                answer = self._await(number, {})
                if answer.newest == number:
                    raise UserError(failed[0])
                log.warning("round %d: %s; taking round %d", number, failed[0], answer.newest)
                continue
            digest = RoundDigest(sums for _, sums, _ in results)
            if digest.hex() != answer.digest and any(was_ahead for _, _, was_ahead in results):
                log.warning("round %d: what was taken ahead of it is not what is said of it; taking it again", number)
                continue
            self._check_digest(digest, answer)
            self.round, self.uploaded, self.digest = number, False, answer.digest
            self._outgoing.go_on_from(taken)
            return taken
        raise UserError("rounds go by faster than this peer can download them; raise the server's keep_snapshots")

    def _take(
        self, number: int, taken: dict[str, torch.Tensor], expected: Values | None
    ) -> tuple[str, tuple[int, int], bool]:
        """Download a round; return why that failed, which may be mended by taking another one, the digest's sums, and
        whether something of it was there before.

        Over all processes of the job, every element is in the sums once.
        """
        digest, caller = RoundDigest(), self._membership.caller
        try:
            streams = self.config.streams
            before = self._outgoing.anchors if number == self.round + 1 else None
            ahead = self._take_ahead(number)
            taken.update(
                download(
                    *(self._route, self._pool, caller, self.parts, number, streams, expected, before, ahead),
                    out=self._out,
                )
            )
        except UserError as error:
            return str(error), digest.sums, False
        for part in self.parts:
            if part.is_primary:
                digest.add(part.spec.name, part.spec.shape, part.box, taken[part.key])
        return "", digest.sums, bool(ahead.values)

    def _check_digest(self, digest: RoundDigest, answer: Answer) -> None:
        """Compare what the processes of the job have downloaded with the journal."""
        if digest.hex() != answer.digest:
            raise UserError(
                f"the values of round {answer.newest} have the digest {digest.hex()} instead of {answer.digest}; the "
                "snapshot on the server is damaged: restore it from a copy"
            )
