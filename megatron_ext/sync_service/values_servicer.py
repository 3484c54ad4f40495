# SPDX-License-Identifier: Apache-2.0
"""The methods of the protocol that move values, and what is refused as gRPC's status codes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from megatron_ext.params import flat_offset
from megatron_ext.sync_service import wire
from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.frames import HEAD_BYTES, Box, Frame, codec_of, cut, payload_of, whole_box
from megatron_ext.sync_service.open_values import OpenValues
from megatron_ext.sync_service.protocol import grpc, pb2, pb2_grpc
from megatron_ext.sync_service.refusal import Refusal
from megatron_ext.sync_service.remote_shard import ShardProblem
from megatron_ext.sync_service.snapshot import Snapshot, state_name
from megatron_ext.sync_service.updates import UPDATE, has_update, kept_as

__all__ = ["HasValues", "ValuesServicer", "refusing", "served"]

_CODES = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "state": grpc.StatusCode.FAILED_PRECONDITION,
    "denied": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "damaged": grpc.StatusCode.DATA_LOSS,
    "later": grpc.StatusCode.UNAVAILABLE,
}

_DIGEST_BYTES = 32

FRAME_BYTES = 1 << 20
"""Of fp32 values in a frame. Every stream holds some copies of one, and there are many streams."""


class HasValues(Protocol):
    """A run, or a part of its values."""

    def upload(self, peer: str, instance: str, number: int, frames: Iterable[Frame]) -> tuple[bool, int, int]:
        """See `Run`."""

    def snapshot(self, peer: str, instance: str, number: int) -> AbstractContextManager[tuple[Snapshot, Catalog]]:
        """See `Run`."""

    def open_values(self, peer: str, instance: str, number: int) -> OpenValues | None:
        """See `Run`."""

    @property
    def codec(self) -> str:
        """See `Run`."""


class ValuesServicer(pb2_grpc.SyncServiceServicer):  # type: ignore[misc]  # generated code has no types
    """Answers calls that move values."""

    def __init__(self, runs: Mapping[str, HasValues]) -> None:
        """Take the runs by their name."""
        self._values = runs

    def Upload(self, requests: Iterator[wire.Upload | wire.Unreadable], context: Any) -> Any:
        """Take frames."""
        with refusing(context):
            uploads = wire.readable(requests)
            first = next(uploads, None)
            if first is None:
                raise Refusal("invalid", "an upload without a message")
            caller = first.caller

            def frames() -> Iterator[Frame]:
                yield from first.frames
                for upload in uploads:
                    yield from upload.frames

            run = served(self._values, caller.run)
            closed, taken, known = run.upload(caller.peer, caller.instance, first.round, frames())
            return pb2.UploadReply(closed=closed, frames=taken, duplicates=known)

    def Download(self, request: Any, context: Any) -> Iterator[wire.Batch]:
        """Send values."""
        with refusing(context):
            caller = request.caller
            run = served(self._values, caller.run)
            if request.ahead:
                known = run.open_values(caller.peer, caller.instance, request.round)
                yield from () if known is None else _known_batches(known, request.slices)
                return
            with run.snapshot(caller.peer, caller.instance, request.round) as (snapshot, catalog):
                is_update = request.HasField("since") and request.since + 1 == request.round
                codec = run.codec if is_update else "fp32"
                yield from _batches(snapshot, catalog, request.slices, codec)


def _batches(snapshot: Snapshot, catalog: Catalog, slices: Iterable[Any], codec: str) -> Iterator[wire.Batch]:
    """Yield messages with the frames of slices, or that they are as expected."""
    unchanged: list[int] = []

    def frames() -> Iterator[Frame]:
        for place, wanted in enumerate(slices):
            spec = catalog[wanted.name]
            box, first = _box(spec, tuple(wanted.start), tuple(wanted.shape))
            if wanted.expected and wanted.expected in _known_as(snapshot, spec, box, first, len(wanted.expected)):
                unchanged.append(place)
            else:
                yield from _frames(snapshot, spec, box, first, codec, wanted.skip)

    yield from _messages((b"", frame) for frame in frames())
    if unchanged:
        yield wire.Batch(unchanged=unchanged)


def _known_as(snapshot: Snapshot, spec: TensorSpec, box: Box, first: int | None, size: int) -> list[bytes]:
    """Return by what a caller may expect the values of a box, in so many bytes."""
    if size != _DIGEST_BYTES:
        return [snapshot.sources[spec.name]] if spec.name in snapshot.sources else []
    found = hashlib.sha256()
    for offset, count in cut(box.numel, FRAME_BYTES):
        if first is None:
            found.update(memoryview(snapshot.read_box(spec.name, box, offset, count).numpy()).cast("B"))
        else:
            found.update(snapshot.read_bytes(spec.name, first + offset, count))
    return [found.digest()]


def _known_batches(known: OpenValues, slices: Iterable[Any]) -> Iterator[wire.Batch]:
    """Yield messages with the frames of those slices of the open round that are known."""

    def frames() -> Iterator[tuple[bytes, Frame]]:
        for wanted in slices:
            spec = known.catalog[wanted.name]
            yield from known.frames(spec, *_box(spec, tuple(wanted.start), tuple(wanted.shape)), FRAME_BYTES)

    return _messages(frames())


def _messages(frames: Iterable[tuple[bytes, Frame]]) -> Iterator[wire.Batch]:
    """Yield messages of about the size of a frame, each of one contribution."""
    batch: list[Frame] = []
    size, last = 0, b""
    for source, frame in frames:
        if batch and (size >= FRAME_BYTES or source != last):
            yield wire.Batch(frames=batch, source=last)
            batch, size = [], 0
        batch.append(frame)
        size, last = size + HEAD_BYTES + len(frame.payload), source
    if batch:
        yield wire.Batch(frames=batch, source=last)


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
    snapshot: Snapshot, spec: TensorSpec, box: Box, first: int | None, codec: str, skip: int
) -> Iterator[Frame]:
    """Yield the frames of a box of a tensor from its value `skip` on.

    They are of its update with a lossy codec, where it has one, else of its values.
    """
    if codec != "fp32" and not has_update(snapshot, spec.name, codec, first, box, spec.numel):
        codec = "fp32"
    source = spec.name if codec == "fp32" else state_name(UPDATE, spec.name)
    cuts = [(offset, count) for offset, count in cut(box.numel, FRAME_BYTES) if offset >= skip]
    is_coded = codec_of(codec).elementwise and snapshot.dtype(source) == kept_as(codec)
    for offset, count in cuts:
        if first is None:
            values = snapshot.read_box(source, box, offset, count).float()
            yield Frame.make(spec.name, spec.shape, box, offset, values, codec)
        elif is_coded:
            payload = payload_of(snapshot.read_bytes(source, first + offset, count))
            yield Frame.of_payload(spec.name, spec.shape, box, offset, count, codec, payload)
        else:
            values = snapshot.read(source, first + offset, count)
            yield Frame.make(spec.name, spec.shape, box, offset, values, codec)
