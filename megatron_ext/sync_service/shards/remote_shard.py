# SPDX-License-Identifier: Apache-2.0
"""A shard in another process, as the first server sees it: it is told how the run stands, and asked for its part."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.field_checks import Malformed
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from megatron_ext.sync_service.shards.shard import RoundJob
from megatron_ext.sync_service.shards.shard_calls import Word
from megatron_ext.sync_service.shards.shard_messages import (
    read_common_squares,
    read_damaged,
    read_followed,
    read_made,
    read_measured,
    read_sealed,
    word_message,
    work_message,
)
from megatron_ext.sync_service.values.decision import Decision, Measured
from megatron_ext.sync_service.values.guards import Judged
from megatron_ext.sync_service.values.reduction import DamagedContribution, Made

__all__ = ["RemoteShard", "ShardProblem"]

log = logging.getLogger(__name__)

TELL_SECONDS = 1.0
"""How often a shard is told how the run stands while nothing changes."""

PATIENCE_SECONDS = 0.0
"""How long a call is tried again here: not at all, since the caller that needs the answer asks again."""

_TELL_DEADLINE = 20.0
_WORK_DEADLINE = 86400.0
"""A round's values may take long; a shard that is gone is noticed earlier."""

type _Reader[T] = Callable[[Any, str], T]
"""Takes an answer's message and what it is called, and returns what it says, checked."""


class ShardProblem(OSError):
    """A shard is away, or does not do what it is asked for."""

    def __init__(self, message: str, is_refusal: bool) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class RemoteShard:
    """Another server's part of a run. Its methods may be called from several threads."""

    def __init__(
        self,
        number: int,
        run: str,
        connection: ConnectionConfig,
        changed: threading.Condition,
        word: Callable[[], Word],
        catalog: Callable[[int], tuple[Catalog, str]],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Begin to tell the shard how the run stands.

        Args:
            number: of the shard.
            run: the run id.
            connection: where it is.
            changed: the run's lock, notified of every change.
            word: returns how the run stands; called with the lock held.
            catalog: returns the part of the run's catalog of a shard, and the run's codec; likewise.
            on_fatal: called with what ended the thread that tells it.
        """
        self.number = number
        self.address = connection.server
        self.problem = f"shard {number} at {self.address} has not answered yet"
        self.is_refused = False
        self.spooled: dict[str, int] = {}
        self.codecs: dict[str, str] = {}
        self._run = run
        self._connection = Connection(connection)
        self._changed = changed
        self._word = word
        self._catalog = catalog
        self._on_fatal = on_fatal
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name=f"shard {number}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the shard was told how the run stands now."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._connection.close()

    def seal(self, peer: str, instance: str, index: int, number: int) -> tuple[str | None, int, int]:
        """Make a contribution durable.

        Returns:
            What it lacks, None when it is whole; its frames and bytes.

        Raises:
            ShardProblem: the shard does not do it.
        """
        wanted = pb2.Seal(peer=peer, instance=instance, index=index, round=number)
        found = self._call("seal", wanted, read_sealed)
        return found.missing, found.frames, found.bytes

    def measure(self, job: RoundJob) -> list[Measured]:
        """See `Shard`.

        Raises:
            ShardProblem: the shard does not do it.
        """
        found = self._work_on("measure", job, None, read_measured)
        if len(found) != len(job.uploaders):
            raise self._misunderstood("measure", f"it has {len(found)} contributions of {len(job.uploaders)}")
        return found

    def common_squares(self, job: RoundJob, decision: Decision) -> dict[Judged, float]:
        """See `Shard`.

        Raises:
            ShardProblem: the shard does not do it.
        """
        return self._work_on("common_squares", job, decision, read_common_squares)

    def write(self, job: RoundJob, decision: Decision) -> Made:
        """See `Shard`.

        Raises:
            ShardProblem: the shard does not do it.
        """
        return self._work_on("write", job, decision, read_made)

    def _work_on[T](self, call: str, job: RoundJob, decision: Decision | None, read: _Reader[T]) -> T:
        def refuse_damaged(message: Any, where: str) -> None:
            peer, problem = read_damaged(message, where)
            if peer not in {uploader.peer for uploader in job.uploaders}:
                raise Malformed(f"peer {peer!r} has contributed nothing")
            raise DamagedContribution(peer, f"{problem} (on shard {self.number})")

        return self._call(call, work_message(job, decision), read, _WORK_DEADLINE, refuse_damaged)

    def _work(self) -> None:
        try:
            self._keep_telling()
        except BaseException as error:  # whatever ends this thread has to end the run, and not in silence
            self._on_fatal(error)

    def _keep_telling(self) -> None:
        """Tell the shard every change, and now and then that there is none."""
        told: Word | None = None
        due = 0.0
        while True:
            with self._changed:
                # One that is away is tried again after a while, whatever changes.
                while (self._word() == told or self.problem) and not self._stopping and time.monotonic() < due:
                    self._changed.wait(due - time.monotonic())
                stopping, word = self._stopping, self._word()
            if not (stopping and word == told):
                told = word if self._tell(word) else None
            if stopping:
                return
            due = time.monotonic() + TELL_SECONDS

    def _tell(self, word: Word) -> bool:
        """Tell the shard how the run stands, and return whether it goes along."""
        word = replace(word, shard=self.number)
        problem, is_refused = "", False
        try:
            reply = self._call("follow", word_message(word), read_followed, _TELL_DEADLINE)
            if reply.wants_catalog:
                with self._changed:
                    catalog, codec = self._catalog(self.number)
                word = replace(word, catalog=catalog, codec=codec)
                reply = self._call("follow", word_message(word), read_followed, _TELL_DEADLINE)
            self.spooled, self.codecs = reply.spooled, reply.codecs
        except ShardProblem as error:
            problem, is_refused = str(error), error.is_refusal
        with self._changed:
            if problem != self.problem:
                if problem:
                    log.warning("run %s: %s", self._run, problem)
                else:
                    log.info("run %s: shard %d at %s is here", self._run, self.number, self.address)
                self.problem, self.is_refused = problem, is_refused
                self._changed.notify_all()
        return not problem

    def _misunderstood(self, call: str, problem: str) -> ShardProblem:
        where = f"shard {self.number} at {self.address}"
        return ShardProblem(f"{where}: its answer to {call}: {problem}; install the same release everywhere", True)

    def _call[T](
        self,
        call: str,
        message: Any,
        read: _Reader[T],
        seconds: float | None = None,
        refuse_damaged: _Reader[None] | None = None,
    ) -> T:
        request = pb2.ShardRequest(run=self._run, protocol=PROTOCOL_VERSION, **{call: message})
        try:
            reply = self._connection.call("Shard", request, seconds=seconds)
            found = reply.WhichOneof("answer")
            if found == "damaged" and refuse_damaged is not None:
                refuse_damaged(reply.damaged, call)
            if found != call:
                raise Malformed(f"it is {'empty' if found is None else f'one to {found}'}")
            return read(getattr(reply, call), call)
        except Malformed as error:
            raise self._misunderstood(call, str(error)) from error
        except UserError as error:
            answer = error.__cause__
            code = answer.code() if isinstance(answer, grpc.RpcError) else None
            text = answer.details() if isinstance(answer, grpc.RpcError) else str(error)
            where = f"shard {self.number} at {self.address}"
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                raise ShardProblem(f"{where} does not answer ({text}); see that it runs", False) from error
            if code == grpc.StatusCode.INVALID_ARGUMENT:
                # Servers of protocol 4 and earlier take no other request than theirs for one.
                ours = f"this server speaks protocol {PROTOCOL_VERSION}; install the same release everywhere"
                raise ShardProblem(f"{where} cannot read a request ({text}); {ours}", True) from error
            raise ShardProblem(f"{where}: {text}", code != grpc.StatusCode.RESOURCE_EXHAUSTED) from error
