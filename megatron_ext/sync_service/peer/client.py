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
from dataclasses import replace
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
from megatron_ext.sync_service.protocol.resuming import KEPT_RESULTS, Adopt, Claim, Continue
from megatron_ext.sync_service.protocol.round_digest import RoundDigest

__all__ = ["ClientConfig", "Report", "RoundOutcome", "SyncClient", "Values"]

log = logging.getLogger(__name__)

Frozen = Callable[[str], torch.Tensor | None]
"""Returns the values of a part that a peer does not train, given its key; None where they are not at hand."""

_FORGOTTEN = "it is too long ago to know whether it counted this peer's contribution"
_UPLOADS = 3
"""How many times a contribution is uploaded when servers lose it meanwhile."""


class SyncClient:
    """A peer, or one process of it. Not for several threads at once, except for `abandon`."""

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
        self.place: Progress | None = None
        self.counted: Progress | None = None
        self.asynchronous = False
        self._sent = -1
        self._may_count = -1
        """The round in which a contribution may count: who comes too late does not even say that it is whole."""
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
            peer's.

        Raises:
            UserError: the server refuses, naming what does not fit.
        """
        registered = self._membership.register(self.catalog)
        self.index, self.peers, self.uploaded = registered.index, registered.peers, False
        self.asynchronous = registered.asynchronous
        self._outgoing.sends_gradients |= registered.asynchronous
        self._looks_ahead = registered.looks_ahead
        self._job.on_all(lambda: self._route.lead(registered.shards, self.catalog, registered.shard_of))
        return registered.open_round

    def start(self, values: Values, *, repeats: bool = True) -> dict[str, torch.Tensor]:
        """Register, and return the values that everybody continues from.

        They are those of the newest round. At the beginning of a run there is none yet, and one peer, whom the server
        chooses, publishes its own.

        Args:
            values: this peer's.
            repeats: whether this process makes again, exactly, the run's first interval of which an earlier one has
                contributed to the open round, before it asks for that. Otherwise the round is awaited here.

        Raises:
            UserError: the server refuses, or nobody publishes.
        """
        taken = self.begin(Claim(repeats=repeats), values)
        assert taken is not None  # only a whole claim needs none
        return taken

    def resume(self, number: int, digest: str = "", *, repeats: bool = True) -> dict[str, torch.Tensor] | None:
        """Register, and resume in the middle of the interval after a round whose values this peer has taken before.

        `residuals` are to be set before, as they were after that round. They are dropped as far as an earlier process
        of this peer has sent them already, in a contribution that counts and that this one does not make again.

        Args:
            number: the round.
            digest: of its values, as `digest` was after it; not compared when empty.
            repeats: whether this process makes the rest of the interval exactly as an earlier one has. What that has
                contributed is awaited otherwise.

        Returns:
            The values of the newest round where the interval is lost, or counts already; None where it resumes.

        Raises:
            UserError: the server refuses, does not know the round, or has other values in it.
        """
        return self.begin(Claim(round=number, digest=digest, whole=True, repeats=repeats), {})

    def begin(self, claim: Claim, values: Values) -> dict[str, torch.Tensor] | None:
        """Register, and resume where the server says, as `start` and `resume` do for claims without samples.

        Afterwards `place` says how far this peer's training is, if the server knows it better than the claim, and
        `counted` what of that is committed.

        Args:
            claim: what this process begins with.
            values: this peer's, should they be wanted as the common start; none with a whole claim.

        Returns:
            The values to resume from; None where they are the claim's own.

        Raises:
            UserError: the server refuses, naming what does not fit.
        """
        self.register()
        if not claim.whole:
            self._await(0, values)
        return self._decided(claim)

    def _decided(self, claim: Claim) -> dict[str, torch.Tensor] | None:
        """Do what the server decides on a claim; see `begin`."""
        answer = self._membership.resume(claim, end=time.monotonic() + self.config.round_seconds)
        keeps_values = claim.whole and isinstance(answer, Continue)
        taken = None
        if not keeps_values or self._outgoing.sends_gradients:
            taken = self._adopt(answer.round, answer.digest)
            if isinstance(answer, Continue) and self.round != answer.round:
                return self._decided(claim)  # others have made rounds meanwhile
        else:
            self.round, self.digest = answer.round, answer.digest
        self.place, self.counted, self.uploaded = answer.place, None, False
        if isinstance(answer, Continue) and not answer.send:
            # What was sent is made again now, from the same state: what it has lost can be worked out.
            self.uploaded, self._sent = True, self.round + 1
            self._may_count = self._sent
        if isinstance(answer, Adopt):
            self.counted = answer.place if answer.is_committed else None
            if answer.keeps_residuals is not None:
                self._outgoing.drop_residuals(answer.keeps_residuals)
            if claim.whole:
                log.warning("the interval after round %d is over; this peer takes round %d", claim.round, self.round)
        return None if keeps_values else taken

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
                self._may_count = number
                closed, missing = self._membership.commit(number, self._report)
            if not missing:
                break
            # A server that resumes elsewhere has the rounds, and not what was uploaded since.
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
        if answer.contributed:
            self.counted = self._report.progress
        if answer.contributed and settled is not None:
            expected = dict(settled.owned) if answer.newest == number else {}
            self._outgoing.keep_residuals(settled, answer.excluded)
        elif self._may_count == number and not self.asynchronous and answer.newest - number >= KEPT_RESULTS:
            # If it counted it has brought the residuals from before, which must not come a second time.
            answer = replace(answer, message=_FORGOTTEN)
            log.warning("round %d: %s", number, _FORGOTTEN)
            self._outgoing.drop_residuals()
        elif not answer.contributed:
            log.warning("round %d did not count this peer's contribution: %s", number, answer.message or "it was late")
        if answer.newest == self.round + 1:
            expected |= self._kept(answer.kept, frozen)
        adopted = self._adopt(answer.newest, answer.digest, expected)
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

    def _await(self, number: int, values: Values) -> Answer:
        """Return the answer that a round is committed, after doing what is wanted for it.

        Args:
            number: the round.
            values: what is uploaded should it be wanted.
        """
        end = time.monotonic() + self.config.round_seconds
        while True:
            answer = self._membership.ask(number, uploaded=self.uploaded, end=end)
            if answer.is_committed:
                return answer
            if answer.wants_upload:
                self.upload(number, values)

    def _adopt(self, number: int, digest: str, expected: Values | None = None) -> dict[str, torch.Tensor]:
        """Download a round, or a newer one when it is not kept any more, and continue from it.

        Args:
            number: the round.
            digest: of its values, as the server says.
            expected: what some parts should be in that round, which are then not sent.
        """
        taken: dict[str, torch.Tensor] = {}
        for _ in range(3):
            results = self._job.on_all(partial(self._take, number, taken, expected))
            failed = [text for text, _, _ in results if text]
            if failed:
                # Further rounds were made meanwhile, and this one is no longer kept. What was uploaded is judged, and
                # none of those awaits it.
                self.uploaded = False
                answer = self._await(number, {})
                if answer.newest == number:
                    raise UserError(failed[0])
                log.warning("round %d: %s; taking round %d", number, failed[0], answer.newest)
                number, digest = answer.newest, answer.digest
                continue
            found = RoundDigest(sums for _, sums, _ in results).hex()
            if found != digest and any(was_ahead for _, _, was_ahead in results):
                log.warning("round %d: what was taken ahead of it is not what is said of it; taking it again", number)
                continue
            if found != digest:
                raise UserError(
                    f"the values of round {number} have the digest {found} instead of {digest}; the snapshot on the "
                    "server is damaged: restore it from a copy"
                )
            self.round, self.uploaded, self.digest = number, False, digest
            self._outgoing.continue_from(taken)
            return taken
        raise UserError("rounds go by faster than this peer can download them; raise the server's keep_snapshots")

    def _take(
        self, number: int, taken: dict[str, torch.Tensor], expected: Values | None
    ) -> tuple[str, tuple[int, int], bool]:
        """Download a round; return why that failed, which taking another one may repair, the digest's sums, and
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
