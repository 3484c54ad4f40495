# SPDX-License-Identifier: Apache-2.0
"""The methods of the protocol that move values, and what is refused as gRPC's status codes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from megatron_ext.params import flat_offset
from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.frames import Box, Frame, cut, whole_box
from megatron_ext.sync_service.protocol import grpc, pb2, pb2_grpc
from megatron_ext.sync_service.refusal import Refusal
from megatron_ext.sync_service.remote_shard import ShardProblem
from megatron_ext.sync_service.snapshot import Snapshot, state_name
from megatron_ext.sync_service.updates import UPDATE, has_update

__all__ = ["HasValues", "ValuesServicer", "refusing", "served"]

_CODES = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "state": grpc.StatusCode.FAILED_PRECONDITION,
    "denied": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "damaged": grpc.StatusCode.DATA_LOSS,
    "later": grpc.StatusCode.UNAVAILABLE,
}

FRAME_BYTES = 1 << 18
"""Of fp32 values in a frame. Every stream holds some copies of one, and there are many streams."""


class HasValues(Protocol):
    """A run, or a part of its values."""

    def upload(self, peer: str, instance: str, number: int, frames: Iterable[Frame]) -> tuple[bool, int, int]:
        """See `Run`."""

    def snapshot(self, peer: str, instance: str, number: int) -> AbstractContextManager[tuple[Snapshot, Catalog]]:
        """See `Run`."""

    @property
    def codec(self) -> str:
        """See `Run`."""


class ValuesServicer(pb2_grpc.SyncServiceServicer):  # type: ignore[misc]  # generated code has no types
    """Answers calls that move values."""

    def __init__(self, runs: Mapping[str, HasValues]) -> None:
        """Take the runs by their name."""
        self._values = runs

    def Upload(self, requests: Iterator[Any], context: Any) -> Any:
        """Take frames."""
        with refusing(context):
            first = next(requests, None)
            if first is None:
                raise Refusal("invalid", "an upload without a message")
            caller = first.caller

            def frames() -> Iterator[Frame]:
                yield from map(Frame.from_message, first.frames)
                for request in requests:
                    yield from map(Frame.from_message, request.frames)

            run = served(self._values, caller.run)
            closed, taken, known = run.upload(caller.peer, caller.instance, first.round, frames())
            return pb2.UploadReply(closed=closed, frames=taken, duplicates=known)

    def Download(self, request: Any, context: Any) -> Iterator[Any]:
        """Send values."""
        with refusing(context):
            caller = request.caller
            run = served(self._values, caller.run)
            with run.snapshot(caller.peer, caller.instance, request.round) as (snapshot, catalog):
                is_update = request.HasField("since") and request.since + 1 == request.round
                codec = run.codec if is_update else "fp32"
                yield from _batches(snapshot, catalog, request.slices, codec)


def _batches(snapshot: Snapshot, catalog: Catalog, slices: Iterable[Any], codec: str) -> Iterator[Any]:
    """Yield messages with the frames of slices, or that they are as expected."""
    batch: list[Any] = []
    size = 0
    unchanged: list[int] = []
    for place, wanted in enumerate(slices):
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


def served[T](runs: Mapping[str, T], name: str) -> T:
    """Return a run.

    Raises:
        Refusal: there is none of that name.
    """
    if name not in runs:
        raise Refusal("not_found", f"run {name!r} is not served here; the runs are: {', '.join(runs)}")
    return runs[name]


@contextmanager
def refusing(context: Any) -> Iterator[None]:
    """Turn what is refused inside into an answer."""
    try:
        yield
    except Refusal as refusal:
        context.abort(_CODES[refusal.reason], str(refusal))
    except ShardProblem as problem:
        context.abort(_CODES["state" if problem.is_refusal else "later"], str(problem))
    except OSError as error:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the server cannot write: {error}")


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
