# SPDX-License-Identifier: Apache-2.0
"""The methods of the protocol, translated to what runs do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_ext.sync_service.callers.origin import Operators, Origin
from megatron_ext.sync_service.protocol.catalog import catalog_of
from megatron_ext.sync_service.protocol.names import path_component
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import NotWhole, Refusal
from megatron_ext.sync_service.protocol.report import Report, progress_message
from megatron_ext.sync_service.protocol.resuming import Adopt, Claim, Continue, Refuse, Wait
from megatron_ext.sync_service.rounds.changes import Changes
from megatron_ext.sync_service.server.run import Run
from megatron_ext.sync_service.server.values_servicer import ValuesServicer, check_protocol, served
from megatron_ext.version import __version__

__all__ = ["Servicer"]


class Servicer(ValuesServicer):
    """Answers calls."""

    def __init__(
        self, runs: Mapping[str, Run], on_drain: Callable[[], None], operators: Operators | None = None
    ) -> None:
        """Take what to answer with.

        Args:
            runs: by their name.
            on_drain: called when the server is asked to end.
            operators: who may evict and drain; None for everybody, where callers show no certificates.
        """
        super().__init__(runs)
        self._operators = operators
        self._runs = runs
        self._on_drain = on_drain

    def Register(self, request: Any, origin: Origin) -> Any:
        """Make the caller a member."""
        check_protocol(request.protocol, "peer")
        caller = request.caller
        admission = self._run(caller.run).admissions.register(
            path_component(caller.peer, "peer"),
            path_component(caller.instance, "process"),
            config=dict(request.config),
            catalog=catalog_of(request.catalog),
            index=request.index if request.HasField("index") else None,
            peers=request.peers if request.HasField("peers") else None,
            asynchronous=request.asynchronous,
            sharded=request.sharded,
            certificate=origin.certificate,
            take_over=request.take_over,
            data=request.data,
            continue_run=request.continue_run,
            alive_seconds=request.alive_seconds,
        )
        config = self._run(caller.run).config
        return pb2.RegisterReply(
            index=admission.index,
            peers=config.peers,
            open_round=admission.open_round,
            asynchronous=config.is_asynchronous,
            shards=admission.shards,
            shard_of=admission.shard_of,
            looks_ahead=not config.is_asynchronous,
            warning=admission.warning,
        )

    def Resume(self, request: Any, _origin: Origin) -> Any:
        """Say where the caller resumes."""
        caller = request.caller
        answer, awaited = self._run(caller.run).resume(caller.peer, caller.instance, Claim.of(request.claim))
        match answer:
            case Refuse():
                raise Refusal("state", answer.why)
            case Wait():
                return pb2.ResumeReply(round=answer.round, message=awaited)
            case Continue():
                return pb2.ResumeReply(
                    state=pb2.ResumeReply.CONTINUE,
                    round=answer.round,
                    digest=answer.digest,
                    send=answer.send,
                    place=progress_message(answer.place),
                )
            case Adopt():
                return pb2.ResumeReply(
                    state=pb2.ResumeReply.ADOPT,
                    round=answer.round,
                    digest=answer.digest,
                    send=True,
                    place=progress_message(answer.place),
                    is_committed=answer.is_committed,
                    drops_residuals=answer.keeps_residuals is not None,
                    keeps_residuals=sorted(answer.keeps_residuals or ()),
                )

    def Heartbeat(self, request: Any, _origin: Origin) -> Any:
        """Note that the caller is alive."""
        caller = request.caller
        self._run(caller.run).admissions.heartbeat(caller.peer, caller.instance, request.alive_seconds)
        return pb2.HeartbeatReply()

    def Commit(self, request: Any, _origin: Origin) -> Any:
        """Count a contribution as whole."""
        caller = request.caller
        report = Report.of(request)
        try:
            closed = self._run(caller.run).commit(caller.peer, caller.instance, request.round, report)
        except NotWhole as problem:
            return pb2.CommitReply(missing=str(problem))
        return pb2.CommitReply(closed=closed)

    def Await(self, request: Any, _origin: Origin) -> Any:
        """Say what the caller is to do as things are."""
        caller = request.caller
        run = self._run(caller.run)
        answer, message = run.look(caller.peer, caller.instance, request.round, uploaded=request.uploaded)
        if answer != "committed":
            return pb2.AwaitReply(state=pb2.AwaitReply.State.Value(answer.upper()), message=message)
        taken, asked = run.result(caller.peer, request.round)
        reason = "" if asked is None else asked.why_without(caller.peer)
        excluded = {} if asked is None else asked.excluded.get(caller.peer, {})
        return pb2.AwaitReply(
            state=pb2.AwaitReply.COMMITTED,
            newest_round=taken.number,
            digest=taken.digest,
            contributed=asked is not None and caller.peer in asked.contributors,
            contributors=[] if asked is None else asked.contributors,
            message=reason,
            excluded=[pb2.Exclusion(unit=unit, reason=why) for unit, why in excluded.items()],
            kept=taken.kept,
        )

    def awaited(self, request: Any) -> Changes:
        """Return what changes before `Await` or `Resume` says something else."""
        return self._run(request.caller.run).changes

    def Leave(self, request: Any, _origin: Origin) -> Any:
        """End a membership."""
        self._run(request.caller.run).admissions.leave(request.caller.peer, request.caller.instance)
        return pb2.LeaveReply()

    def Status(self, request: Any, _origin: Origin) -> Any:
        """Say how things are."""
        runs = [run.status() for run in self._runs.values()]
        return pb2.StatusReply(version=__version__, runs=[pb2.RunStatus(**run) for run in runs])

    def Evict(self, request: Any, origin: Origin) -> Any:
        """End somebody else's membership."""
        self._check_operator(origin, "evict peers")
        self._run(request.run).admissions.evict(request.peer, request.reason or "no reason was given")
        return pb2.EvictReply()

    def Drain(self, request: Any, origin: Origin) -> Any:
        """Bring the server to an end."""
        self._check_operator(origin, "drain the server")
        rounds = [f"{run.name}: {run.resting.drain()}" for run in self._runs.values()]
        self._on_drain()
        return pb2.DrainReply(message=", ".join(rounds))

    def Shard(self, request: Any, _origin: Origin) -> Any:
        """Refuse to be led by another server."""
        raise Refusal("state", "it was started as a first server; start it with --shard and the others' list")

    def _check_operator(self, origin: Origin, what: str) -> None:
        """Check that a caller may do more than peers may.

        Raises:
            Refusal: it may not.
        """
        if self._operators is not None and not self._operators.include(origin):
            raise Refusal(
                "denied",
                f"the certificate of {origin.certificate!r} may not {what}; the server's own may, and those that its "
                "configuration lists under operators",
            )

    def _run(self, name: str) -> Run:
        return served(self._runs, name)
