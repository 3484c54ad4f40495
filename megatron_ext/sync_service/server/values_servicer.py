# SPDX-License-Identifier: Apache-2.0
"""The methods of the protocol that move values."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron_ext.params import flat_offset
from megatron_ext.sync_service.callers.call_limits import Caller
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import state_name
from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import HEAD_BYTES, Box, Frame, codec_of, cut, payload_of, whole_box
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.values.open_values import OpenValues
from megatron_ext.sync_service.values.updates import UPDATE, has_update, kept_as
from megatron_ext.version import __version__

__all__ = ["FRAME_BYTES", "Downloading", "HasValues", "Uploading", "ValuesServicer", "check_protocol", "served"]

_DIGEST_BYTES = 32

FRAME_BYTES = 1 << 20
"""Of fp32 values in a frame. Every stream holds some copies of one, and there are many streams."""

_STEP_BYTES, _SLICE_BYTES = 16 << 20, 16 << 10
"""After how many bytes that were compared a download gives its thread to others, and for how many a slice counts that
takes none: a message goes out then, with whatever there is."""


class HasValues(Protocol):
    """A run, or a part of its values."""

    async def hear(self, peer: str, instance: str, least: int) -> None:
        """Wait until it is known whether a process speaks for a peer, in a run whose open round is so far."""

    def check_caller(self, peer: str, instance: str) -> None:
        """Check that a process speaks for a peer.

        Raises:
            Refusal: it does not.
        """

    def upload(self, peer: str, instance: str, number: int, frames: Iterable[Frame]) -> tuple[bool, int, int]:
        """See `Run`."""

    def snapshot(self, peer: str, instance: str, number: int) -> AbstractContextManager[tuple[Snapshot, Catalog]]:
        """See `Run`."""

    def open_values(self, peer: str, instance: str, number: int) -> OpenValues | None:
        """See `Run`."""

    @property
    def codec(self) -> str:
        """See `Run`."""


class _OfCaller:
    """A call that moves values, and whose first message says who makes it."""

    def __init__(self, runs: Mapping[str, HasValues], caller: Any) -> None:
        """Take who the message names.

        Raises:
            Refusal: the run is not served here.
        """
        self._run = served(runs, caller.run)
        self.caller = Caller.of(caller)

    def check(self) -> None:
        """Check that the caller is who it says.

        Raises:
            Refusal: it is not.
        """
        self._run.check_caller(self.caller.peer, self.caller.instance)


class Uploading(_OfCaller):
    """The call of one upload. Its methods may be called in different threads, one after the other."""

    def __init__(self, runs: Mapping[str, HasValues], first: bytes) -> None:
        """Take the call's first message, in which there may be frames in addition to the caller.

        Raises:
            Refusal: it cannot be read, or its run is not served here.
        """
        self._first: wire.Upload | None = _unpacked(first)
        super().__init__(runs, self._first.caller)
        self._round = self._first.round
        self._closed, self._taken, self._known = False, 0, 0

    async def hear(self) -> None:
        """Wait until it is known whether the caller is who it says."""
        await self._run.hear(self.caller.peer, self.caller.instance, self._round)

    def take_first(self) -> bool:
        """Take the frames of the first message, as `take` does."""
        assert self._first is not None
        frames, self._first = self._first.frames, None
        return self._take(frames)

    def take(self, message: bytes) -> bool:
        """Take the frames of a further message.

        Returns:
            Whether the round was closed before, so that no more are wanted.

        Raises:
            Refusal: a frame or the caller is refused; the frames before it are kept.
            OSError: the disk refuses.
        """
        return self._take(_unpacked(message).frames)

    @property
    def reply(self) -> Any:
        """The answer at the end."""
        return pb2.UploadReply(closed=self._closed, frames=self._taken, duplicates=self._known)

    def _take(self, frames: Iterable[Frame]) -> bool:
        found = self._run.upload(self.caller.peer, self.caller.instance, self._round, frames)
        self._closed, self._taken, self._known = found[0], self._taken + found[1], self._known + found[2]
        return self._closed


class Downloading(_OfCaller):
    """The call of one download: an iterator of packed messages, for different threads, one at a time."""

    def __init__(self, runs: Mapping[str, HasValues], request: Any) -> None:
        """Take the request.

        Raises:
            Refusal: its run is not served here.
        """
        super().__init__(runs, request.caller)
        self._request = request
        self._lock = threading.Lock()
        self._messages = self._packed()
        self.slices = len(request.slices)

    async def hear(self) -> None:
        """Wait until it is known whether the caller is who it says."""
        least = self._request.round if self._request.ahead else self._request.round + 1
        await self._run.hear(self.caller.peer, self.caller.instance, least)

    def next(self) -> bytes | None:
        """Return the next message, None at the end. However much is asked for, this does not take long.

        Raises:
            Refusal: what is asked for is not there, or the caller is refused.
            OSError: it cannot be read.
        """
        with self._lock:
            return next(self._messages, None)

    def close(self) -> None:
        """Give back what the call holds."""
        with self._lock:
            self._messages.close()

    def _packed(self) -> Generator[bytes]:
        request = self._request
        caller, run = request.caller, self._run
        if request.ahead:
            known = run.open_values(caller.peer, caller.instance, request.round)
            yield from () if known is None else map(wire.pack, _known_batches(known, request.slices))
            return
        with run.snapshot(caller.peer, caller.instance, request.round) as (snapshot, catalog):
            is_update = request.HasField("since") and request.since + 1 == request.round
            codec = run.codec if is_update else "fp32"
            yield from map(wire.pack, _batches(snapshot, catalog, request.slices, codec))


class ValuesServicer:
    """Answers calls that move values. The methods of all servicers may be called from several threads."""

    def __init__(self, runs: Mapping[str, HasValues]) -> None:
        """Take the runs by their name."""
        self._values = runs

    def Upload(self, first: bytes) -> Uploading:
        """Begin to take frames."""
        return Uploading(self._values, first)

    def Download(self, request: Any) -> Downloading:
        """Begin to send values."""
        return Downloading(self._values, request)


def _unpacked(message: bytes) -> wire.Upload:
    return next(wire.readable([wire.unpack_upload(message)]))


def _batches(snapshot: Snapshot, catalog: Catalog, slices: Iterable[Any], codec: str) -> Iterator[wire.Batch]:
    """Yield messages with the frames of slices, or that they are as expected."""
    unchanged: list[int] = []

    def frames() -> Iterator[tuple[bytes, Frame] | int]:
        for place, wanted in enumerate(slices):
            yield _SLICE_BYTES
            spec = catalog[wanted.name]
            box, first = _box(spec, tuple(wanted.start), tuple(wanted.shape))
            if wanted.expected and (yield from _is_known_as(wanted.expected, snapshot, spec, box, first)):
                unchanged.append(place)
            else:
                for frame in _frames(snapshot, spec, box, first, codec, wanted.skip):
                    yield b"", frame

    yield from _messages(frames(), unchanged)


def _is_known_as(
    expected: bytes, snapshot: Snapshot, spec: TensorSpec, box: Box, first: int | None
) -> Generator[int, None, bool]:
    """Return whether a box has the values that a caller expects; yield how many bytes were compared meanwhile."""
    if len(expected) != _DIGEST_BYTES:
        return snapshot.sources.get(spec.name) == expected
    found = hashlib.sha256()
    for offset, count in cut(box.numel, FRAME_BYTES):
        if first is None:
            found.update(memoryview(snapshot.read_box(spec.name, box, offset, count).numpy()).cast("B"))
        else:
            found.update(snapshot.read_bytes(spec.name, first + offset, count))
        yield 4 * count
    return found.digest() == expected


def _known_batches(known: OpenValues, slices: Iterable[Any]) -> Iterator[wire.Batch]:
    """Yield messages with the frames of those slices of the open round that are known."""

    def frames() -> Iterator[tuple[bytes, Frame] | int]:
        for wanted in slices:
            yield _SLICE_BYTES
            spec = known.catalog[wanted.name]
            yield from known.frames(spec, *_box(spec, tuple(wanted.start), tuple(wanted.shape)), FRAME_BYTES)

    return _messages(frames(), [])


def _messages(frames: Iterable[tuple[bytes, Frame] | int], unchanged: list[int]) -> Iterator[wire.Batch]:
    """Yield messages of about the size of a frame, each of one contribution, and none later than some work.

    Args:
        frames: with their contributions; among them how many bytes of work were done without one.
        unchanged: places of slices that are as expected, which `frames` adds to.
    """
    batch: list[Frame] = []
    size, work, last = 0, 0, b""

    def message() -> wire.Batch:
        nonlocal batch, size, work
        made = wire.Batch(frames=batch, unchanged=tuple(unchanged), source=last)
        batch, size, work = [], 0, 0
        unchanged.clear()
        return made

    for found in frames:
        if isinstance(found, int):
            work += found
            if work >= _STEP_BYTES:
                yield message()
            continue
        source, frame = found
        if batch and (size >= FRAME_BYTES or source != last):
            yield message()
        batch.append(frame)
        size, last = size + HEAD_BYTES + len(frame.payload), source
    if batch or unchanged:
        yield message()


def check_protocol(theirs: int, who: str) -> None:
    """Check that a caller and this server understand each other.

    Args:
        theirs: version of the protocol that the caller has named; 0 when it has named none.
        who: calls.

    Raises:
        Refusal: they may not.
    """
    if theirs != PROTOCOL_VERSION:
        raise Refusal(
            "state",
            f"the server (megatron_ext {__version__}) speaks protocol {PROTOCOL_VERSION}, the {who} "
            f"{theirs or 'an earlier one'}; install the same release on both sides",
        )


def served[T](runs: Mapping[str, T], name: str) -> T:
    """Return a run.

    Raises:
        Refusal: there is none of that name.
    """
    if name not in runs:
        raise Refusal("not_found", f"run {name!r} is not served here; the runs are: {', '.join(runs)}")
    return runs[name]


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
    is_coded = codec_of(codec).is_cast and snapshot.dtype(source) == kept_as(codec)
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
