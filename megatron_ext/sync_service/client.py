# SPDX-License-Identifier: Apache-2.0
"""A peer's side of the sync service, for plain tensors.

client = SyncClient(ClientConfig(connection=..., run="demo", peer="peer-0"), values)
values = client.start(values)              # everybody begins with the same values
for every interval:
    ...                                    # train
    values = client.sync(values).values    # all peers' values, made one
client.leave()
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.catalog import Catalog
from megatron_ext.sync_service.config import NAME
from megatron_ext.sync_service.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.download import download
from megatron_ext.sync_service.frames import CODECS
from megatron_ext.sync_service.outgoing import Outgoing, Part, Values
from megatron_ext.sync_service.protocol import PROTOCOL_VERSION, pb2
from megatron_ext.sync_service.refusal import Refusal
from megatron_ext.sync_service.snapshot import RoundDigest

__all__ = ["ClientConfig", "RoundOutcome", "SyncClient", "Values"]

log = logging.getLogger(__name__)

_POLL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """One peer of one run."""

    connection: ConnectionConfig
    """Where the server is."""

    run: str
    """The run id."""

    peer: str
    """This peer's name, which is its own for the whole run."""

    index: int | None = None
    """Its place among the peers; the lowest free one unless given."""

    peers: int | None = None
    """How many peers there are; the server refuses another number than its own."""

    codec: str = "fp32"
    """How contributions travel: fp32, bf16, fp16, int8 or int4. All but fp32 lose something, which this peer sends
    along with its next contribution (error feedback). Must be the same for all peers."""

    agreed: Mapping[str, str] = field(default_factory=dict)
    """Whatever else must be the same for all peers, by the name of the field."""

    streams: int = 4
    """Parallel streams of an upload or download."""

    frame_bytes: int = 1 << 20
    """Bytes of a frame."""

    call_bytes: int = 32 << 20
    """Bytes of an upload call: what is sent again when one fails."""

    round_seconds: float = 3600.0
    """How long a round is awaited before this peer gives up."""

    def check(self) -> None:
        """Check the values.

        Raises:
            UserError: one cannot be used.
        """
        if not NAME.fullmatch(self.peer):
            raise UserError(f"peer is {self.peer!r}; use up to 64 letters, digits, '.', '_' and '-'")
        if self.codec not in CODECS:
            raise UserError(f"codec is {self.codec!r}; use one of {', '.join(CODECS)}")
        if "codec" in self.agreed:
            raise UserError("agreed has a field 'codec', which is sent anyway; drop it")
        if not 4096 <= self.frame_bytes <= 4 << 20:
            raise UserError(f"frame_bytes is {self.frame_bytes}; it must be 4096 to {4 << 20}")
        if self.streams < 1 or self.call_bytes < self.frame_bytes:
            raise UserError("streams must be 1 or more, and call_bytes at least frame_bytes")


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What a round gave."""

    number: int
    """The newest committed round: the one that was asked for, or a later one."""

    values: dict[str, torch.Tensor]
    """Its values."""

    contributed: bool
    """Whether this peer's contribution counted in the round it was made for."""

    contributors: tuple[str, ...]
    """Who counted in it; empty when that is long ago."""

    message: str
    """Why this peer's contribution did not count."""


class SyncClient:
    """A peer. Not for several threads at once."""

    def __init__(self, config: ClientConfig, catalog: Catalog | Values) -> None:
        """Prepare; nothing is sent before `register`.

        Args:
            config: of the peer.
            catalog: the tensors that the peers have in common, or values to take it from.

        Raises:
            UserError: the configuration or the catalog cannot be used.
        """
        config.check()
        try:
            self.catalog = catalog if isinstance(catalog, Catalog) else Catalog.of_tensors(catalog)
        except Refusal as refusal:
            raise UserError(f"catalog: {refusal}") from refusal
        self.config = config
        self.index = -1
        self.peers = 0
        self.round = -1
        self.uploaded = False
        self._sent = -1
        self._outgoing = Outgoing(self.catalog, config.codec, config.frame_bytes)
        self._caller = pb2.Caller(run=config.run, peer=config.peer, instance=uuid.uuid4().hex)
        self._connection = Connection(config.connection)
        self._pool = ThreadPoolExecutor(config.streams)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the membership stays."""
        self._pool.shutdown()
        self._connection.close()

    def register(self) -> int:
        """Become a member of the run.

        Returns:
            The open round; 0 when the common start is awaited. `index` and `peers` say which part of the data is this
            peer's, `uploaded` whether an earlier process of it has contributed to the open round.

        Raises:
            UserError: the server refuses, naming what does not fit.
        """
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
        self.index, self.peers, self.uploaded = reply.index, reply.peers, reply.uploaded
        return int(reply.open_round)

    def start(self, values: Values) -> dict[str, torch.Tensor]:
        """Register, and return the values that everybody goes on from.

        They are those of the newest round. At the beginning of a run there is none yet, and one peer, whom the server
        chooses, publishes its own.

        Args:
            values: this peer's.

        Raises:
            UserError: the server refuses, or nobody publishes.
        """
        self._check_values(values, everything=True)
        open_round = self.register()
        was_uploaded = self.uploaded
        reply = self._await(0, values)
        adopted = self._adopt(reply)
        # What an earlier process of this peer has contributed to the open round counts; it is not sent twice.
        self.uploaded = was_uploaded and open_round == self.round + 1
        return adopted

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
        self._check_values(values, everything=number == 0)
        jobs = list(self._outgoing.jobs(number, self.index, self.config.call_bytes))
        closed = any(self._pool.map(lambda job: self._upload_job(number, job, values), jobs))
        if not closed:
            closed = bool(self._connection.call("Commit", pb2.CommitRequest(caller=self._caller, round=number)).closed)
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
        reply = self._await(number, values)
        if reply.contributed and self._sent == number:
            self._outgoing.counted(number, self.index, values)
        elif not reply.contributed:
            log.warning("round %d did not count this peer's contribution: %s", number, reply.message or "it was late")
        adopted = self._adopt(reply)
        return RoundOutcome(
            number=self.round,
            values=adopted,
            contributed=reply.contributed,
            contributors=tuple(reply.contributors),
            message=reply.message,
        )

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """What this peer's contributions have lost so far, by tensor, 1-D; belongs into its checkpoints."""
        return self._outgoing.residuals

    @residuals.setter
    def residuals(self, residuals: dict[str, torch.Tensor]) -> None:
        self._outgoing.residuals = residuals

    def leave(self) -> None:
        """End the membership; what was committed counts."""
        self._connection.call("Leave", pb2.LeaveRequest(caller=self._caller))

    # -----------------------------------------------------------------------------------------------------------
    # Up
    # -----------------------------------------------------------------------------------------------------------

    def _upload_job(self, number: int, job: list[Part], values: Values) -> bool:
        def requests() -> Iterator[Any]:
            for frames in self._outgoing.batches(number, job, values):
                messages = [frame.to_message() for frame in frames]
                yield pb2.UploadRequest(caller=self._caller, round=number, frames=messages)

        return bool(self._connection.call("Upload", requests).closed)

    def _check_values(self, values: Values, *, everything: bool) -> None:
        for spec in self.catalog:
            if not everything and not spec.is_trained_by(self.index):
                continue
            value = values.get(spec.name)
            if value is None:
                raise UserError(f"tensor {spec.name!r} of the catalog is not among the values")
            if tuple(value.shape) != spec.shape or value.dtype != torch.float32 or value.device.type != "cpu":
                raise UserError(
                    f"tensor {spec.name!r} is {value.dtype} of shape {tuple(value.shape)} on {value.device}; it must "
                    f"be torch.float32 of shape {spec.shape} on the CPU"
                )

    # -----------------------------------------------------------------------------------------------------------
    # Down
    # -----------------------------------------------------------------------------------------------------------

    def _await(self, number: int, values: Values) -> Any:
        """Return the answer that a round is committed, after doing what is wanted for it."""
        end = time.monotonic() + self.config.round_seconds
        while True:
            request = pb2.AwaitRequest(caller=self._caller, round=number, uploaded=self.uploaded, seconds=_POLL_SECONDS)
            reply = self._connection.call("Await", request, seconds=_POLL_SECONDS + 30)
            if reply.state == pb2.AwaitReply.COMMITTED:
                return reply
            if reply.state in (pb2.AwaitReply.PUBLISH, pb2.AwaitReply.UPLOAD):
                self.upload(number, values)
            elif time.monotonic() > end:
                raise UserError(
                    f"round {number} has not come in {self.config.round_seconds:.0f} s: {reply.message}; bring the "
                    "missing peers back, or lower the run's quorum and restart the server"
                )

    def _adopt(self, reply: Any) -> dict[str, torch.Tensor]:
        """Download the newest round that an answer speaks of, and go on from it."""
        for _ in range(3):
            number = reply.newest_round
            try:
                values = download(self._connection, self._pool, self._caller, self.catalog, number, self.config.streams)
            except UserError as error:
                # Rounds went on meanwhile, and this one is no longer kept.
                reply = self._await(number, {})
                if reply.newest_round == number:
                    raise
                log.warning("round %d: %s; taking round %d", number, error, reply.newest_round)
                continue
            digest = RoundDigest()
            for spec in self.catalog:
                digest.add(spec.name, values[spec.name])
            if digest.hex() != reply.digest:
                raise UserError(
                    f"the values of round {number} have the digest {digest.hex()} instead of {reply.digest}; the "
                    "snapshot on the server is damaged: restore it from a copy"
                )
            self.round, self.uploaded = int(number), False
            self._outgoing.go_on_from(values)
            return values
        raise UserError("rounds go by faster than this peer can download them; raise the server's keep_snapshots")
