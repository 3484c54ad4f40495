# SPDX-License-Identifier: Apache-2.0
"""A shard in another process, as the first server sees it: it is told how the run stands, and asked for its part."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.protocol.protocol import grpc, pb2
from megatron_ext.sync_service.protocol.schema import Kind, Malformed, parse
from megatron_ext.sync_service.shards.shard import RoundJob
from megatron_ext.sync_service.shards.shard_calls import (
    COMMON_SQUARES,
    DAMAGED,
    FOLLOWED,
    MEASURED,
    SEALED,
    WRITTEN,
    Damaged,
)
from megatron_ext.sync_service.shards.shard_messages import decision_to_json, job_to_json
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

Word = dict[str, Any]
"""How a run stands; see `Run.word`."""


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
        catalog: Callable[[int], Word],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Begin to tell the shard how the run stands.

        Args:
            number: of the shard.
            run: the run id.
            connection: where it is.
            changed: the run's lock, notified of every change.
            word: returns how the run stands; called with the lock held.
            catalog: returns the part of the run's catalog of a shard, and what else it has to know once; likewise.
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
        wanted = {"peer": peer, "instance": instance, "index": index, "round": number}
        found = self._call("seal", wanted, SEALED)
        return found.missing, found.frames, found.bytes

    def measure(self, job: RoundJob) -> list[Measured]:
        """See `Shard`.

        Raises:
            ShardProblem: the shard does not do it.
        """
        found = self._work_on("measure", job, None, MEASURED)
        if len(found) != len(job.uploaders):
            raise self._misunderstood("measure", f"it has {len(found)} contributions of {len(job.uploaders)}")
        return found

    def common_squares(self, job: RoundJob, decision: Decision) -> dict[Judged, float]:
        """See `Shard`.

        Raises:
            ShardProblem: the shard does not do it.
        """
        return self._work_on("common_squares", job, decision, COMMON_SQUARES)

    def write(self, job: RoundJob, decision: Decision) -> Made:
        """See `Shard`.

        Raises:
            ShardProblem: the shard does not do it.
        """
        return self._work_on("write", job, decision, WRITTEN)

    def _work_on[T](self, call: str, job: RoundJob, decision: Decision | None, kind: Kind[T]) -> T:
        arguments = {"job": job_to_json(job), "decision": None if decision is None else decision_to_json(decision)}

        def done_or_damaged(value: Any, where: str) -> T | Damaged:
            is_damaged = isinstance(value, dict) and "damaged" in value
            return DAMAGED(value, where) if is_damaged else kind(value, where)

        found = self._call(call, arguments, done_or_damaged, _WORK_DEADLINE)
        if not isinstance(found, Damaged):
            return found
        if found.peer not in {uploader.peer for uploader in job.uploaders}:
            raise self._misunderstood(call, f"peer {found.peer!r} has contributed nothing")
        raise DamagedContribution(found.peer, f"{found.problem} (on shard {self.number})")

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
        word = {**word, "shard": self.number}
        problem, is_refused = "", False
        try:
            reply = self._call("follow", word, FOLLOWED, _TELL_DEADLINE)
            if reply.wants_catalog:
                with self._changed:
                    catalog = self._catalog(self.number)
                reply = self._call("follow", {**word, **catalog}, FOLLOWED, _TELL_DEADLINE)
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

    def _call[T](self, call: str, arguments: dict[str, Any], kind: Kind[T], seconds: float | None = None) -> T:
        request = pb2.ShardRequest(run=self._run, call=call, json=json.dumps(arguments))
        try:
            return kind(parse(self._connection.call("Shard", request, seconds=seconds).json), call)
        except Malformed as error:
            raise self._misunderstood(call, str(error)) from error
        except UserError as error:
            answer = error.__cause__
            code = answer.code() if isinstance(answer, grpc.RpcError) else None
            text = answer.details() if isinstance(answer, grpc.RpcError) else str(error)
            where = f"shard {self.number} at {self.address}"
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                raise ShardProblem(f"{where} does not answer ({text}); see that it runs", False) from error
            raise ShardProblem(f"{where}: {text}", code != grpc.StatusCode.RESOURCE_EXHAUSTED) from error
