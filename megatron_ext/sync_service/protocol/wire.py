# SPDX-License-Identifier: Apache-2.0
"""Messages with frames as they travel: UploadRequest and FrameBatch of sync.proto, byte for byte.

protobuf's own classes copy a payload four times between a tensor and the wire, and twice back, in memory
that is taken and given back for every message. Here it is copied once when sent and not at all when received:
frames that were received look into the message that they came in. Everything but payloads goes through protobuf.
`python -m benchmarks.messages` measures both: a message of 1 MiB takes some 0.2 ms here, and 4 ms there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.sync_service.protocol.frames import HEAD_BYTES, MAX_PAYLOAD, Frame
from megatron_ext.sync_service.protocol.protocol import DecodeError, GetMessageClass, pb2
from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = ["METHODS", "Batch", "Unreadable", "Upload", "calls_of", "pack", "readable", "unpack_batch", "unpack_upload"]

_SERVICE = pb2.DESCRIPTOR.services_by_name["SyncService"]

_PAYLOAD = pb2.Frame.DESCRIPTOR.fields_by_name["payload"].number
_UPLOAD_FRAMES = pb2.UploadRequest.DESCRIPTOR.fields_by_name["frames"].number
_BATCH_FRAMES = pb2.FrameBatch.DESCRIPTOR.fields_by_name["frames"].number

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""

_MAX_FRAMES = MAX_PAYLOAD // HEAD_BYTES
"""In a message. No client puts more into one, as few bytes as they may take, and all are in memory at once."""

METHODS = f"/{_SERVICE.full_name}/"
"""Begins the names of the methods."""


@dataclass(kw_only=True)
class Upload:
    """An UploadRequest."""

    caller: Any
    """Read from the first message of a stream."""

    round: int
    """Likewise."""

    frames: Sequence[Frame]
    """Unchecked where they were received."""


@dataclass(kw_only=True)
class Batch:
    """A FrameBatch."""

    frames: Sequence[Frame] = ()
    """Unchecked where they were received."""

    unchanged: Sequence[int] = ()
    """Places in the request of slices that the caller has already."""

    source: bytes = b""
    """Of the open round: which contribution the frames are of."""


@dataclass(frozen=True)
class Unreadable:
    """What was received instead of a message. gRPC has to be given something: it leaves calls hanging otherwise."""

    problem: str
    """What is wrong with it."""


def pack(message: Upload | Batch) -> bytes:
    """Return the bytes of a message."""
    if isinstance(message, Upload):
        rest, number = pb2.UploadRequest(caller=message.caller, round=message.round), _UPLOAD_FRAMES
    else:
        rest, number = pb2.FrameBatch(unchanged=message.unchanged, source=message.source), _BATCH_FRAMES
    pieces: list[bytes | memoryview] = [rest.SerializeToString()]
    for frame in message.frames:
        head = frame.head()
        payload = _tag(_PAYLOAD, _BYTES) + _varint(len(frame.payload))
        size = len(head) + len(payload) + len(frame.payload)
        pieces += (_tag(number, _BYTES) + _varint(size), head, payload, frame.payload)
    return b"".join(pieces)


def unpack_upload(data: bytes) -> Upload | Unreadable:
    """Return the UploadRequest that bytes hold, whose frames look into them."""
    try:
        message, frames = _unpacked(data, pb2.UploadRequest, _UPLOAD_FRAMES)
    except DecodeError as error:
        return Unreadable(f"an upload's message cannot be read: {error}")
    return Upload(caller=message.caller, round=message.round, frames=frames)


def unpack_batch(data: bytes) -> Batch | Unreadable:
    """Return the FrameBatch that bytes hold, whose frames look into them."""
    try:
        message, frames = _unpacked(data, pb2.FrameBatch, _BATCH_FRAMES)
    except DecodeError as error:
        return Unreadable(f"a download's message cannot be read: {error}")
    return Batch(frames=frames, unchanged=message.unchanged, source=message.source)


def readable(messages: Iterable[Upload | Unreadable]) -> Iterator[Upload]:
    """Yield the messages of an upload.

    Raises:
        Refusal: one cannot be read.
    """
    for message in messages:
        if isinstance(message, Unreadable):
            raise Refusal("invalid", message.problem)
        yield message


def calls_of(channel: Any) -> dict[str, Any]:
    """Return what makes the calls of a channel, by the methods' names.

    Those with streams move values: their messages with frames are what is defined here.
    """
    return {method.name: _call_of(channel, method) for method in _SERVICE.methods}


def _call_of(channel: Any, method: Any) -> Any:
    uploads, downloads = method.client_streaming, method.server_streaming
    kind = f"{'stream' if uploads else 'unary'}_{'stream' if downloads else 'unary'}"
    return getattr(channel, kind)(
        METHODS + method.name,
        request_serializer=pack if uploads else GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=unpack_batch if downloads else GetMessageClass(method.output_type).FromString,
    )


@dataclass
class _Reader:
    """Walks through the fields of a message."""

    data: memoryview
    at: int = 0

    def fields(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (number, wire type, start, end) of every field, the latter two of its content."""
        size = len(self.data)
        while self.at < size:
            key = self._varint()
            number, kind = key >> 3, key & 7
            if kind == _BYTES:
                length = self._varint()
                begin, end = self.at, self.at + length
            elif kind == _VARINT:
                begin = self.at
                self._varint()
                end = self.at
            elif kind in (_FIXED32, _FIXED64):
                begin, end = self.at, self.at + (4 if kind == _FIXED32 else 8)
            else:
                raise DecodeError(f"field {number} has the wire type {kind}")
            if end > size:
                raise DecodeError(f"field {number} ends behind the message")
            self.at = end
            yield number, kind, begin, end

    def _varint(self) -> int:
        value = shift = 0
        while True:
            if self.at >= len(self.data) or shift > 63:
                raise DecodeError("a number is cut off")
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7


def _unpacked(data: bytes, kind: Any, number: int) -> tuple[Any, list[Frame]]:
    """Return a message of a kind without its frames, and the frames, which are its fields of this number."""
    frames: list[Frame] = []

    def take(content: memoryview) -> None:
        if len(frames) == _MAX_FRAMES:
            raise DecodeError(f"it has more than {_MAX_FRAMES} frames")
        payloads: list[memoryview] = []
        head = _rest(content, _PAYLOAD, payloads.append)
        frames.append(Frame.from_message(pb2.Frame.FromString(head), payloads[-1] if payloads else b""))

    return kind.FromString(_rest(memoryview(data), number, take)), frames


def _rest(data: memoryview, number: int, take: Callable[[memoryview], None]) -> bytes:
    """Return a message without its fields of a number, whose contents are given away."""
    reader, pieces, begin = _Reader(data), list[memoryview](), 0
    for found, kind, start, end in reader.fields():
        if found == number:
            if kind != _BYTES:
                raise DecodeError(f"field {number} has the wire type {kind}")
            take(data[start:end])
        else:
            pieces.append(data[begin:end])
        begin = end
    return b"".join(pieces)


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
