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
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.catalog import Catalog
from megatron_ext.sync_service.client_config import ClientConfig
from megatron_ext.sync_service.connection import Connection
from megatron_ext.sync_service.download import download
from megatron_ext.sync_service.job import Job, OneProcess
from megatron_ext.sync_service.outgoing import Outgoing, Piece
from megatron_ext.sync_service.parts import Part, Values, whole_parts
from megatron_ext.sync_service.protocol import PROTOCOL_VERSION, pb2
from megatron_ext.sync_service.refusal import Refusal
from megatron_ext.sync_service.snapshot import RoundDigest

__all__ = ["ClientConfig", "RoundOutcome", "SyncClient", "Values"]

log = logging.getLogger(__name__)

_POLL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What a round gave."""

    number: int
    """The newest committed round: the one that was asked for, or a later one."""

    values: dict[str, torch.Tensor]
    """Its values: of every tensor by name, or of this process's parts by their keys."""

    contributed: bool
    """Whether this peer's contribution counted in the round it was made for."""

    contributors: tuple[str, ...]
    """Who counted in it; empty when that is long ago."""

    message: str
    """Why this peer's contribution did not count."""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What the server has said to a job that awaits a round, as plain data."""

    state: int
    """COMMITTED, or what is wanted."""

    newest: int
    """The newest committed round."""

    digest: str
    """Of its values."""

    contributed: bool
    """Whether this peer's contribution counted in the round that was asked for."""

    contributors: tuple[str, ...]
    """Whose did."""

    message: str
    """Why this one did not, or who is awaited."""


class SyncClient:
    """A peer, or one process of it. Not for several threads at once."""

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
        self._has_all = parts is None
        self._job = OneProcess() if job is None else job
        self.index = -1
        self.peers = 0
        self.round = -1
        self.uploaded = False
        self._sent = -1
        self._outgoing = Outgoing(self.parts, config.codec, config.frame_bytes)
        instance = self._job.on_first(lambda: uuid.uuid4().hex)
        self._caller = pb2.Caller(run=config.run, peer=config.peer, instance=instance)
        self._job.on_all(self._connect)
        self._pool = ThreadPoolExecutor(config.streams)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the membership stays."""
        self._pool.shutdown()
        self._connection.close()

    def rest(self) -> None:
        """Close the connection until the next call."""
        self._connection.close()

    def register(self) -> int:
        """Become a member of the run.

        Returns:
            The open round; 0 when the common start is awaited. `index` and `peers` say which part of the data is this
            peer's, `uploaded` whether an earlier process of it has contributed to the open round.

        Raises:
            UserError: the server refuses, naming what does not fit.
        """
        self.index, self.peers, self.uploaded, open_round = self._job.on_first(self._register)
        return open_round

    def start(self, values: Values) -> dict[str, torch.Tensor]:
        """Register, and return the values that everybody goes on from.

        They are those of the newest round. At the beginning of a run there is none yet, and one peer, whom the server
        chooses, publishes its own.

        Args:
            values: this peer's.

        Raises:
            UserError: the server refuses, or nobody publishes.
        """
        open_round = self.register()
        was_uploaded = self.uploaded
        adopted = self._adopt(self._await(0, values))
        # What an earlier process of this peer has contributed to the open round counts; it is not sent twice.
        self.uploaded = was_uploaded and open_round == self.round + 1
        return adopted

    def resume(self, number: int) -> dict[str, torch.Tensor] | None:
        """Register, and go on in the middle of the interval after a round whose values this peer has taken before.

        Args:
            number: the round.

        Returns:
            The values of the newest round if that is a later one: the interval was lost. None if it is this one.

        Raises:
            UserError: the server refuses, or knows nothing of the round yet.
        """
        open_round = self.register()
        if open_round <= number:
            newest = open_round - 1 if open_round else "none"
            raise UserError(
                f"this peer goes on from round {number}, but the newest one of run {self.config.run!r} on the server "
                f"is {newest}: the server has lost rounds, or is another one; restore its folder, or begin a run under "
                "another name"
            )
        if open_round > number + 1:
            log.warning("round %d is over; this peer goes on from the newest one", number + 1)
            return self._adopt(self._await(number + 1, {}))
        was_uploaded, lossy = self.uploaded, self.config.codec != "fp32"
        if lossy:
            taken = self._adopt(self._await(number, {}))
            if self.round != number:
                return taken
        self.round, self.uploaded = number, was_uploaded
        return None

    def sync(self, values: Values) -> RoundOutcome:
        """Make a round: upload, wait for the others, download.

        Args:
            values: after this peer's interval; at least those that it trains.

        Raises:
            UserError: the server refuses, the round does not come, or the values have not the catalog's shapes.
        """
        number = self.round + 1
        if not self.uploaded:
            self.upload(number, values)
        return self.fetch(number, values)

    def upload(self, number: int, values: Values) -> bool:
        """Upload and commit a contribution.

        Returns:
            Whether it came in time.

        Raises:
            UserError: as for `sync`.
        """
        closed = any(self._job.on_all(lambda: self._upload_mine(number, values)))
        if not closed:
            request = pb2.CommitRequest(caller=self._caller, round=number)
            closed = self._job.on_first(lambda: bool(self._connection.call("Commit", request).closed))
        self.uploaded = not closed
        self._sent = number
        return not closed

    def fetch(self, number: int, values: Values) -> RoundOutcome:
        """Wait for a round and take its values.

        Args:
            number: the round.
            values: what was uploaded, should it be wanted again.

        Raises:
            UserError: as for `sync`.
        """
        answer = self._await(number, values)
        if answer.contributed and self._sent == number:
            self._outgoing.counted(number, self.index, values)
        elif not answer.contributed:
            log.warning("round %d did not count this peer's contribution: %s", number, answer.message or "it was late")
        adopted = self._adopt(answer)
        return RoundOutcome(
            number=self.round,
            values=adopted,
            contributed=answer.contributed,
            contributors=answer.contributors,
            message=answer.message,
        )

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """What this process's contributions have lost so far, by part, 1-D; belongs into the peer's checkpoints."""
        return self._outgoing.residuals

    @residuals.setter
    def residuals(self, residuals: dict[str, torch.Tensor]) -> None:
        self._outgoing.residuals = residuals

    def leave(self) -> None:
        """End the membership; what was committed counts."""
        request = pb2.LeaveRequest(caller=self._caller)
        self._job.on_first(lambda: bool(self._connection.call("Leave", request)))

    def _connect(self) -> None:
        self._connection = Connection(self.config.connection)

    def _register(self) -> tuple[int, int, bool, int]:
        """Return index, number of peers, whether there is a contribution to the open round, and that round."""
        config = self.config
        reply = self._connection.call(
            "Register",
            pb2.RegisterRequest(
                caller=self._caller,
                protocol=PROTOCOL_VERSION,
                config={**config.agreed, "codec": config.codec},
                catalog=[
                    pb2.TensorSpec(name=spec.name, shape=spec.shape, unit=spec.unit, owners=spec.owners)
                    for spec in self.catalog
                ],
                index=config.index,
                peers=config.peers,
            ),
        )
        return int(reply.index), int(reply.peers), bool(reply.uploaded), int(reply.open_round)

    # -----------------------------------------------------------------------------------------------------------
    # Up
    # -----------------------------------------------------------------------------------------------------------

    def _upload_mine(self, number: int, values: Values) -> bool:
        """Upload this process's share; return whether the round was closed before."""
        self._check_values(values, everything=number == 0)
        jobs = list(self._outgoing.jobs(number, self.index, self.config.call_bytes))
        return any(self._pool.map(lambda job: self._upload_job(number, job, values), jobs))

    def _upload_job(self, number: int, job: list[Piece], values: Values) -> bool:
        def requests() -> Iterator[Any]:
            for frames in self._outgoing.batches(number, job, values):
                messages = [frame.to_message() for frame in frames]
                yield pb2.UploadRequest(caller=self._caller, round=number, frames=messages)

        return bool(self._connection.call("Upload", requests).closed)

    def _check_values(self, values: Values, *, everything: bool) -> None:
        for part in self.parts:
            if not part.is_primary or not (everything or part.spec.is_trained_by(self.index)):
                continue
            value = values.get(part.key)
            if value is None:
                raise UserError(f"tensor {part.key!r} of the catalog is not among the values")
            if tuple(value.shape) != part.box.shape or value.dtype != torch.float32 or value.device.type != "cpu":
                raise UserError(
                    f"tensor {part.key!r} is {value.dtype} of shape {tuple(value.shape)} on {value.device}; it must "
                    f"be torch.float32 of shape {part.box.shape} on the CPU"
                )

    # -----------------------------------------------------------------------------------------------------------
    # Down
    # -----------------------------------------------------------------------------------------------------------

    def _await(self, number: int, values: Values) -> _Answer:
        """Return the answer that a round is committed, after doing what is wanted for it."""
        end = time.monotonic() + self.config.round_seconds
        while True:
            answer = self._job.on_first(lambda: self._ask(number, end))
            if answer.state == pb2.AwaitReply.COMMITTED:
                return answer
            if answer.state in (pb2.AwaitReply.PUBLISH, pb2.AwaitReply.UPLOAD):
                self.upload(number, values)

    def _ask(self, number: int, end: float) -> _Answer:
        """Return what the server says of a round, at the latest at its next word after `end`."""
        while True:
            request = pb2.AwaitRequest(caller=self._caller, round=number, uploaded=self.uploaded, seconds=_POLL_SECONDS)
            reply = self._connection.call("Await", request, seconds=_POLL_SECONDS + 30)
            if reply.state != pb2.AwaitReply.WAITING:
                return _Answer(
                    state=reply.state,
                    newest=reply.newest_round,
                    digest=reply.digest,
                    contributed=reply.contributed,
                    contributors=tuple(reply.contributors),
                    message=reply.message,
                )
            if time.monotonic() > end:
                raise UserError(
                    f"round {number} has not come in {self.config.round_seconds:.0f} s: {reply.message}; bring the "
                    "missing peers back, or lower the run's quorum and restart the server"
                )

    def _adopt(self, answer: _Answer) -> dict[str, torch.Tensor]:
        """Download the newest round that an answer speaks of, and go on from it."""
        taken: dict[str, torch.Tensor] = {}
        for _ in range(3):
            number = answer.newest
            failed = [text for text in self._job.on_all(partial(self._take, number, taken)) if text]
            if failed:
                # Rounds went on meanwhile, and this one is no longer kept.
                answer = self._await(number, {})
                if answer.newest == number:
                    raise UserError(failed[0])
                log.warning("round %d: %s; taking round %d", number, failed[0], answer.newest)
                continue
            self._check_digest(taken, answer)
            self.round, self.uploaded = number, False
            self._outgoing.go_on_from(taken)
            return taken
        raise UserError("rounds go by faster than this peer can download them; raise the server's keep_snapshots")

    def _take(self, number: int, taken: dict[str, torch.Tensor]) -> str:
        """Download a round; return why that failed, which may be mended by taking another one."""
        try:
            taken.update(download(self._connection, self._pool, self._caller, self.parts, number, self.config.streams))
        except UserError as error:
            return str(error)
        return ""

    def _check_digest(self, values: Values, answer: _Answer) -> None:
        """Compare what was downloaded with the journal; whoever has parts alone relies on the frames' checksums."""
        if not self._has_all:
            return
        digest = RoundDigest()
        for spec in self.catalog:
            digest.add(spec.name, values[spec.name])
        if digest.hex() != answer.digest:
            raise UserError(
                f"the values of round {answer.newest} have the digest {digest.hex()} instead of {answer.digest}; the "
                "snapshot on the server is damaged: restore it from a copy"
            )
