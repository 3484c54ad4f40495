# SPDX-License-Identifier: Apache-2.0
"""What a peer says to the server beside its values. The first process of a job says it, and all hear the answer."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection
from megatron_ext.sync_service.channel.reminder import Reminder
from megatron_ext.sync_service.peer.config import ClientConfig
from megatron_ext.sync_service.peer.heartbeat import Heartbeat
from megatron_ext.sync_service.peer.job import Job
from megatron_ext.sync_service.protocol.catalog import Catalog, tensor_messages
from megatron_ext.sync_service.protocol.durations import ALIVE_HEARTBEATS
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, pb2
from megatron_ext.sync_service.protocol.report import Progress, Report, progress_message
from megatron_ext.sync_service.protocol.resuming import Adopt, Claim, Continue

__all__ = ["Answer", "Membership", "Registered"]

log = logging.getLogger(__name__)

_POLL_SECONDS = 10.0
"""How long the server may keep a call that awaits a round."""

_ANSWER_SECONDS = 30.0
"""How much later its answer may come."""


@dataclass(frozen=True, kw_only=True)
class Registered:
    """What the server has said to a peer that registered, as plain data."""

    index: int
    """The peer's place among the peers."""

    peers: int
    """How many there are."""

    open_round: int
    """The round that takes contributions."""

    asynchronous: bool
    """Whether every contribution is a round of its own, and a pseudo-gradient with any codec."""

    shards: tuple[str, ...]
    """Addresses of the servers that have parts of the values; none where the one that was asked has all."""

    shard_of: tuple[int, ...]
    """Which of them has a tensor, in the order of the catalog."""

    looks_ahead: bool
    """Whether they can be asked for what is known of the open round."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server has said to a peer that awaits a round, as plain data."""

    state: int
    """COMMITTED, or what is wanted."""

    newest: int
    """The round to continue from: the newest one, or the one that this peer's contribution made alone."""

    digest: str
    """Of its values."""

    contributed: bool
    """Whether this peer's contribution counted in the round that was asked for."""

    contributors: tuple[str, ...]
    """Whose did."""

    message: str
    """Why this one did not, or who is awaited."""

    excluded: dict[str, str]
    """Units in which this peer's contribution did not count although it did in others, with the reasons."""

    kept: frozenset[int]
    """Places in the catalog of tensors that the newest round has left as they were."""

    @property
    def is_committed(self) -> bool:
        """Whether the round is there."""
        return bool(self.state == pb2.AwaitReply.COMMITTED)

    @property
    def wants_upload(self) -> bool:
        """Whether the peer's values are wanted, as the start or because they were lost."""
        return self.state in (pb2.AwaitReply.PUBLISH, pb2.AwaitReply.UPLOAD)


class Membership:
    """A peer's place in its run. All processes of the job call all methods together."""

    def __init__(self, config: ClientConfig, connection: Connection, job: Job) -> None:
        """Prepare; nothing is sent before `register`."""
        self._config = config
        self._connection = connection
        self._job = job
        self._heartbeat: Heartbeat | None = None
        instance = job.on_first(lambda: uuid.uuid4().hex)
        self.caller = pb2.Caller(run=config.run, peer=config.peer, instance=instance)

    def register(self, catalog: Catalog) -> Registered:
        """Become a member of the run.

        Args:
            catalog: the tensors that the peers have in common.

        Raises:
            UserError: the server refuses, naming what does not fit.
        """
        config = self._config
        request = pb2.RegisterRequest(
            caller=self.caller,
            protocol=PROTOCOL_VERSION,
            config={**config.agreed, **config.coding},
            catalog=tensor_messages(catalog),
            index=config.index,
            peers=config.peers,
            asynchronous=True,
            sharded=True,
            take_over=config.take_over,
            data=config.data,
            continue_run=config.continue_run,
            alive_seconds=ALIVE_HEARTBEATS * config.heartbeat_seconds,
        )

        def register() -> Registered:
            reply = self._connection.call("Register", request)
            if reply.warning:
                log.warning("%s", reply.warning)
            if config.heartbeat_seconds:
                self._heartbeat = Heartbeat(config.connection, self.caller, config.heartbeat_seconds)
            return Registered(
                index=reply.index,
                peers=reply.peers,
                open_round=reply.open_round,
                asynchronous=reply.asynchronous,
                shards=tuple(reply.shards),
                shard_of=tuple(reply.shard_of),
                looks_ahead=reply.looks_ahead,
            )

        self.rest()
        return self._job.on_first(register)

    def commit(self, number: int, report: Report) -> tuple[bool, str]:
        """Say that the contribution to a round is whole.

        Args:
            number: the round.
            report: what the first process says of the interval.

        Returns:
            Whether the round was closed before, and what the contribution lacks, empty when nothing.

        Raises:
            UserError: the server refuses.
        """
        request = pb2.CommitRequest(
            caller=self.caller,
            round=number,
            loss=report.loss,
            steps=report.steps,
            progress=progress_message(report.progress),
        )

        def commit() -> tuple[bool, str]:
            reply = self._connection.call("Commit", request)
            return reply.closed, reply.missing

        return self._job.on_first(commit)

    def resume(self, claim: Claim, *, end: float) -> Continue | Adopt:
        """Return where this peer resumes.

        Args:
            claim: what it begins with.
            end: on the monotonic clock, when it gives up after the server's next word.

        Raises:
            UserError: the server refuses, or what an earlier process has contributed waits for too long.
        """
        message = pb2.Claim(
            round=claim.round,
            digest=claim.digest,
            whole=claim.whole,
            repeats=claim.repeats,
            steps=claim.steps,
            begin=progress_message(claim.begin),
            now=progress_message(claim.now),
        )
        return self._job.on_first(lambda: self._resume(message, end))

    def ask(self, number: int, *, uploaded: bool, end: float) -> Answer:
        """Return what the server says of a round once that is more than to wait.

        Args:
            number: the round.
            uploaded: whether this peer has contributed to it.
            end: on the monotonic clock, when this peer gives up after the server's next word.

        Raises:
            UserError: the server refuses, or the round does not come.
        """
        return self._job.on_first(lambda: self._ask(number, uploaded, end))

    def rest(self) -> None:
        """Send no more heartbeats; the membership stays."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def leave(self) -> None:
        """End the membership; what was committed counts."""
        self.rest()
        request = pb2.LeaveRequest(caller=self.caller)
        self._job.on_first(lambda: bool(self._connection.call("Leave", request)))

    def _ask(self, number: int, uploaded: bool, end: float) -> Answer:
        request = pb2.AwaitRequest(caller=self.caller, round=number, uploaded=uploaded)
        reply = self._polled("Await", request, end)
        return Answer(
            state=reply.state,
            newest=reply.newest_round,
            digest=reply.digest,
            contributed=reply.contributed,
            contributors=tuple(reply.contributors),
            message=reply.message,
            excluded={exclusion.unit: exclusion.reason for exclusion in reply.excluded},
            kept=frozenset(reply.kept),
        )

    def _resume(self, claim: Any, end: float) -> Continue | Adopt:
        reply = self._polled("Resume", pb2.ResumeRequest(caller=self.caller, claim=claim), end)
        place = Progress.of(reply.place) if reply.HasField("place") else None
        if reply.state == pb2.ResumeReply.CONTINUE:
            return Continue(send=reply.send, round=reply.round, digest=reply.digest, place=place)
        return Adopt(
            round=reply.round,
            digest=reply.digest,
            place=place,
            is_committed=reply.is_committed,
            keeps_residuals=frozenset(reply.keeps_residuals) if reply.drops_residuals else None,
        )

    def _polled(self, method: str, request: Any, end: float) -> Any:
        """Return the reply of a method that waits, once that is more than to wait.

        Raises:
            UserError: the server refuses, or the round does not come.
        """
        call_seconds = self._connection.config.call_seconds
        request.seconds = min(_POLL_SECONDS, call_seconds)
        deadline = request.seconds + min(_ANSWER_SECONDS, call_seconds)
        began, reminder = time.monotonic(), Reminder()
        while True:
            reply = self._connection.call(method, request, seconds=deadline)
            if reply.state:  # 0 is to wait
                return reply
            number = request.round if method == "Await" else reply.round
            waited = time.monotonic() - began
            if reminder.is_due(waited):
                log.warning("round %d has not come in %.0f s: %s", number, waited, reply.message)
            if time.monotonic() > end:
                raise UserError(
                    f"round {number} has not come in {self._config.round_seconds:.0f} s: {reply.message}; bring the "
                    "missing peers back, or lower the run's quorum and restart the server"
                )
