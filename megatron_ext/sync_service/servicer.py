# SPDX-License-Identifier: Apache-2.0
"""The methods of the protocol, translated to what runs do, and what runs refuse to gRPC's status codes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_ext.params import flat_offset
from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.config import NAME
from megatron_ext.sync_service.frames import Box, Frame, cut, whole_box
from megatron_ext.sync_service.protocol import PROTOCOL_VERSION, grpc, pb2, pb2_grpc
from megatron_ext.sync_service.refusal import NotWhole, Refusal
from megatron_ext.sync_service.report import Report
from megatron_ext.sync_service.run import Run
from megatron_ext.sync_service.snapshot import Snapshot, state_name
from megatron_ext.sync_service.updates import UPDATE, has_update
from megatron_ext.version import __version__

__all__ = ["Servicer"]

_CODES = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "state": grpc.StatusCode.FAILED_PRECONDITION,
    "denied": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "damaged": grpc.StatusCode.DATA_LOSS,
    "later": grpc.StatusCode.UNAVAILABLE,
}

MAX_WAIT_SECONDS = 20.0
"""How long `Await` takes at most, so that a peer learns within it that the server has gone."""

FRAME_BYTES = 1 << 18
"""Of fp32 values in a frame. Every stream holds some copies of one, and there are many streams."""


class Servicer(pb2_grpc.SyncServiceServicer):  # type: ignore[misc]  # generated code has no types
    """Answers calls."""

    def __init__(self, runs: Mapping[str, Run], on_drain: Callable[[], None]) -> None:
        """Take the runs by their name, and what to call when the server shall end."""
        self._runs = runs
        self._on_drain = on_drain

    def Register(self, request: Any, context: Any) -> Any:
        """Make the caller a member."""
        with _refusing(context):
            if request.protocol != PROTOCOL_VERSION:
                raise Refusal(
                    "state",
                    f"the server (megatron_ext {__version__}) speaks protocol {PROTOCOL_VERSION}, the peer "
                    f"{request.protocol}; install the same release on both sides",
                )
            caller = request.caller
            admission = self._run(caller.run).register(
                _name(caller.peer, "peer"),
                _name(caller.instance, "process"),
                config=dict(request.config),
                catalog=_catalog(request.catalog),
                index=request.index if request.HasField("index") else None,
                peers=request.peers if request.HasField("peers") else None,
                asynchronous=request.asynchronous,
            )
            config = self._run(caller.run).config
            return pb2.RegisterReply(
                index=admission.index,
                peers=config.peers,
                open_round=admission.open_round,
                uploaded=admission.uploaded,
                asynchronous=config.is_asynchronous,
                contributed=admission.contributed,
            )

    def Upload(self, requests: Iterator[Any], context: Any) -> Any:
        """Take frames."""
        with _refusing(context):
            first = next(requests, None)
            if first is None:
                raise Refusal("invalid", "an upload without a message")
            caller = first.caller

            def frames() -> Iterator[Frame]:
                yield from map(Frame.from_message, first.frames)
                for request in requests:
                    yield from map(Frame.from_message, request.frames)

            run = self._run(caller.run)
            closed, taken, known = run.upload(caller.peer, caller.instance, first.round, frames())
            return pb2.UploadReply(closed=closed, frames=taken, duplicates=known)

    def Commit(self, request: Any, context: Any) -> Any:
        """Count a contribution as whole."""
        with _refusing(context):
            caller = request.caller
            report = Report(
                loss=request.loss if request.HasField("loss") else None,
                steps=request.steps if request.HasField("steps") else None,
            )
            try:
                closed = self._run(caller.run).commit(caller.peer, caller.instance, request.round, report)
            except NotWhole as problem:
                if not request.can_repeat:
                    raise
                return pb2.CommitReply(missing=str(problem))
            return pb2.CommitReply(closed=closed)

    def Await(self, request: Any, context: Any) -> Any:
        """Say what the caller is to do."""
        with _refusing(context):
            caller = request.caller
            run = self._run(caller.run)
            seconds = min(max(request.seconds, 0.0), MAX_WAIT_SECONDS)
            answer, message = run.wait(
                caller.peer, caller.instance, request.round, uploaded=request.uploaded, seconds=seconds
            )
            if answer != "committed":
                return pb2.AwaitReply(state=pb2.AwaitReply.State.Value(answer.upper()), message=message)
            taken, asked = run.result(caller.peer, request.round, again=request.again)
            reason = "" if asked is None else asked.rejected.get(caller.peer, "")
            excluded = {} if asked is None else asked.excluded.get(caller.peer, {})
            return pb2.AwaitReply(
                state=pb2.AwaitReply.COMMITTED,
                newest_round=taken.number,
                digest=taken.digest,
                contributed=asked is not None and caller.peer in asked.contributors,
                contributors=[] if asked is None else asked.contributors,
                message=reason,
                excluded=[pb2.Exclusion(unit=unit, reason=why) for unit, why in excluded.items()],
            )

    def Download(self, request: Any, context: Any) -> Iterator[Any]:
        """Send values."""
        with _refusing(context):
            caller = request.caller
            run = self._run(caller.run)
            snapshot, catalog = run.snapshot(caller.peer, caller.instance, request.round)
            codec = run.codec if request.HasField("since") and request.since + 1 == request.round else "fp32"
            batch: list[Any] = []
            size = 0
            unchanged: list[int] = []
            for place, wanted in enumerate(request.slices):
                where = snapshot, catalog[wanted.name], tuple(wanted.start), tuple(wanted.shape)
                if wanted.expected and wanted.expected == _digest(*where):
                    unchanged.append(place)
                    continue
                for frame in _frames(*where, codec):
                    batch.append(frame.to_message())
                    size += len(frame.payload)
                    if size >= FRAME_BYTES:
                        yield pb2.FrameBatch(frames=batch)
                        batch, size = [], 0
            if batch or unchanged:
                yield pb2.FrameBatch(frames=batch, unchanged=unchanged)

    def Leave(self, request: Any, context: Any) -> Any:
        """End a membership."""
        with _refusing(context):
            self._run(request.caller.run).leave(request.caller.peer, request.caller.instance)
            return pb2.LeaveReply()

    def Status(self, request: Any, context: Any) -> Any:
        """Say how things are."""
        runs = [run.status() for run in self._runs.values()]
        return pb2.StatusReply(json=json.dumps({"version": __version__, "runs": runs}))

    def Evict(self, request: Any, context: Any) -> Any:
        """End somebody else's membership."""
        with _refusing(context):
            self._run(request.run).evict(request.peer, request.reason or "no reason was given")
            return pb2.EvictReply()

    def Drain(self, request: Any, context: Any) -> Any:
        """Bring the server to an end."""
        for run in self._runs.values():
            run.drain()
        self._on_drain()
        rounds = ", ".join(f"{run.name}: {run.status()['waiting_for']}" for run in self._runs.values())
        return pb2.DrainReply(message=rounds)

    def _run(self, name: str) -> Run:
        if name not in self._runs:
            raise Refusal("not_found", f"run {name!r} is not served here; the runs are: {', '.join(self._runs)}")
        return self._runs[name]


@contextmanager
def _refusing(context: Any) -> Iterator[None]:
    """Turn what is refused inside into an answer."""
    try:
        yield
    except Refusal as refusal:
        context.abort(_CODES[refusal.reason], str(refusal))
    except OSError as error:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the server cannot write: {error}")


def _name(text: str, what: str) -> str:
    if not NAME.fullmatch(text):
        raise Refusal(
            "invalid", f"{text[:100]!r} cannot be the name of a {what}; use up to 64 letters, digits, '.', '_', '-'"
        )
    return text


def _catalog(messages: Any) -> Catalog:
    return Catalog(
        TensorSpec(name=spec.name, shape=tuple(spec.shape), unit=spec.unit, owners=tuple(spec.owners))
        for spec in messages
    )


def _digest(snapshot: Snapshot, spec: TensorSpec, start: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    """Return the SHA-256 of the values of a box of a tensor; of the whole tensor when the box is empty."""
    found = hashlib.sha256()
    box, first = _box(spec, start, shape)
    if first is None:
        found.update(memoryview(snapshot.read_box(spec.name, box).numpy()).cast("B"))
        return found.digest()
    for offset, count in cut(box.numel, FRAME_BYTES):
        found.update(snapshot.read_bytes(spec.name, first + offset, count))
    return found.digest()


def _box(spec: TensorSpec, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Box, int | None]:
    """Return a box of a tensor, the whole when it is empty, and where it begins in the tensor if it has no gaps.

    Raises:
        Refusal: the tensor has no such box.
    """
    box = Box(start, shape) if start or shape else whole_box(spec.shape)
    fits = len(box.start) == len(box.shape) == len(spec.shape)
    if not fits or any(n < 1 or a + n > size for a, n, size in zip(box.start, box.shape, spec.shape, strict=True)):
        raise Refusal("invalid", f"the box {start} + {shape} is not in the shape {spec.shape} of tensor {spec.name!r}")
    return box, flat_offset(spec.shape, box.start, box.shape)


def _frames(
    snapshot: Snapshot, spec: TensorSpec, start: tuple[int, ...], shape: tuple[int, ...], codec: str = "fp32"
) -> Iterator[Frame]:
    """Yield the frames of a box of a tensor; of the whole tensor when the box is empty.

    With a lossy codec they are of its update, where there is one for this box, else of its values.
    """
    box, first = _box(spec, start, shape)
    if codec != "fp32" and not has_update(snapshot, spec.name, codec, first, box, spec.numel):
        codec = "fp32"
    source = spec.name if codec == "fp32" else state_name(UPDATE, spec.name)
    if first is not None:
        # A box without gaps is read frame by frame.
        for offset, count in cut(box.numel, FRAME_BYTES):
            if codec == "fp32":
                payload = snapshot.read_bytes(source, first + offset, count)
                yield Frame.of_payload(spec.name, spec.shape, box, offset, count, codec, payload)
            else:
                values = snapshot.read(source, first + offset, count)
                yield Frame.make(spec.name, spec.shape, box, offset, values, codec)
        return
    values = snapshot.read_box(source, box)
    for offset, count in cut(box.numel, FRAME_BYTES):
        yield Frame.make(spec.name, spec.shape, box, offset, values[offset : offset + count], codec)
