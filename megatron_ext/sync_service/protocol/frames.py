# SPDX-License-Identifier: Apache-2.0
"""Frames: the pieces of a tensor between a peer and the server, and in the server's spool.

A frame carries a range of elements of a box of a tensor, coded by itself, with everything that says where they belong
and a checksum over both. `fp32` carries values. Every other codec loses something, and so carries pseudo-gradients (the
values of the last round minus the new ones): the smaller the numbers, the less is lost. Elements that are all 0, such
as the pseudo-gradient of what has not changed, are not coded: the payload is empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import build_codec
from megatron_ext.outer.codecs.codec import LARGEST_GRID, Codec
from megatron_ext.outer.codecs.scaled import BLOCK
from megatron_ext.sync_service.protocol.catalog import MOST_AXES, TensorSpec
from megatron_ext.sync_service.protocol.checksum import crc32
from megatron_ext.sync_service.protocol.protocol import DecodeError, pb2
from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = [
    "HEAD_BYTES",
    "MAX_PAYLOAD",
    "Box",
    "Frame",
    "codec_of",
    "cut",
    "payload_of",
    "step_of",
    "whole_box",
]

MAX_PAYLOAD = 4 * LARGEST_GRID
"""Bytes; a frame with more is refused."""

HEAD_BYTES = 256
"""About the size of a frame in a message without its payload."""


def codec_of(name: str) -> Codec:
    """Return the codec of a name.

    Raises:
        Refusal: there is none.
    """
    try:
        return build_codec(name)
    except UserError as error:
        raise Refusal("invalid", str(error)) from None


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: the first element along each axis, and how many."""

    start: tuple[int, ...]
    """First element."""

    shape: tuple[int, ...]
    """Number of elements."""

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes the box in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def overlaps(self, other: Box) -> bool:
        """Whether the two have elements in common."""
        return all(
            a < b + m and b < a + n for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that is the whole tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Elements `offset` to `offset + count` of a box of a tensor, in row-major order of the box."""

    name: str
    """The tensor."""

    shape: tuple[int, ...]
    """Its global shape."""

    box: Box
    """The part of it that the frame is a part of."""

    offset: int
    """First element within the box."""

    count: int
    """Number of elements."""

    codec: str
    """How they are coded."""

    payload: bytes | memoryview
    """The coded elements; nothing where all are 0."""

    checksum: int
    """CRC-32 of all of the above."""

    @classmethod
    def make(
        cls, name: str, shape: tuple[int, ...], box: Box, offset: int, values: torch.Tensor, codec: str = "fp32"
    ) -> Frame:
        """Return the frame of values.

        Args:
            name: the tensor.
            shape: its global shape.
            box: the part of it.
            offset: first element within the box.
            values: fp32, 1-D, on the CPU; in fp32 the frame looks into their memory.
            codec: how to code them.
        """
        payload = b"" if _are_zero(values) else memoryview(codec_of(codec).encode(values).numpy()).toreadonly()
        return cls.of_payload(name, shape, box, offset, values.numel(), codec, payload)

    @classmethod
    def of_payload(
        cls,
        name: str,
        shape: tuple[int, ...],
        box: Box,
        offset: int,
        count: int,
        codec: str,
        payload: bytes | memoryview,
    ) -> Frame:
        """Return the frame of `count` values that are coded already; otherwise as `make`."""
        head: dict[str, Any] = {"name": name, "shape": shape, "box": box, "offset": offset, "count": count}
        checksum = _checksum(**head, codec=codec, payload=payload)
        return cls(**head, codec=codec, payload=payload, checksum=checksum)

    @property
    def place(self) -> str:
        """Where the frame belongs, for messages."""
        return f"tensor {self.name!r}, elements {self.offset} to {self.offset + self.count} of box {self.box.start}"

    def values(self) -> torch.Tensor:
        """Return the elements as fp32, 1-D, in memory of their own."""
        if not self.payload:
            return torch.zeros(self.count)
        return codec_of(self.codec).decode(torch.frombuffer(bytearray(self.payload), dtype=torch.uint8), self.count)

    def decode_into(self, out: torch.Tensor) -> None:
        """Put the elements into fp32 memory, 1-D on the CPU."""
        if not self.payload:
            out.zero_()
        elif self.codec == "fp32":
            out.numpy().view(np.uint8)[:] = np.frombuffer(self.payload, dtype=np.uint8)
        elif self.codec == "bf16":
            # The upper halves of fp32, with nothing in between: no memory but that of the values.
            np.left_shift(
                np.frombuffer(self.payload, dtype="<u2"), 16, out=out.numpy().view(np.uint32), dtype=np.uint32
            )
        else:
            out.copy_(self.values())

    def check(self) -> None:
        """Check that the frame is whole and makes sense in itself.

        Raises:
            Refusal: its bytes have changed in transit, or it contradicts itself.
        """
        content = {key: getattr(self, key) for key in ("name", "shape", "box", "offset", "count", "codec", "payload")}
        if _checksum(**content) != self.checksum:
            raise Refusal(
                "damaged", f"a frame's checksum is wrong ({self.place}); it changed in transit: send it again"
            )
        axes = len(self.shape)
        if axes > MOST_AXES or len(self.box.start) != axes or len(self.box.shape) != axes:
            raise Refusal("invalid", f"a frame's box does not fit the shape {self.shape} ({self.place})")
        if any(a + n > size or n < 1 for a, n, size in zip(self.box.start, self.box.shape, self.shape, strict=True)):
            raise Refusal("invalid", f"a frame's box leaves the shape {self.shape} ({self.place})")
        if self.count < 1 or self.offset + self.count > self.box.numel:
            raise Refusal("invalid", f"a frame leaves its box of {self.box.numel} elements ({self.place})")
        # However few bytes its codec makes of them, the values take memory.
        size = max(len(self.payload), 4 * self.count)
        if size > MAX_PAYLOAD:
            raise Refusal("invalid", f"a frame has {size} bytes; at most {MAX_PAYLOAD} are possible")
        if len(self.payload) not in (0, codec_of(self.codec).nbytes(self.count)):
            raise Refusal(
                "invalid", f"a frame has {len(self.payload)} bytes, which its codec contradicts ({self.place})"
            )

    def check_against(self, spec: TensorSpec) -> None:
        """Check that the frame is a part of a tensor.

        Raises:
            Refusal: the shapes differ.
        """
        if self.shape != spec.shape:
            raise Refusal("invalid", f"shape of tensor {self.name!r} is {self.shape} instead of {spec.shape}")

    def to_message(self) -> Any:
        """Return the frame as a message of the protocol."""
        message = pb2.Frame.FromString(self.head())
        message.payload = bytes(self.payload)
        return message

    def head(self) -> bytes:
        """Return the bytes of the frame's message without its payload."""
        message = pb2.Frame(
            name=self.name,
            shape=self.shape,
            box_start=self.box.start,
            box_shape=self.box.shape,
            offset=self.offset,
            count=self.count,
            codec=self.codec,
            checksum=self.checksum,
        )
        return bytes(message.SerializeToString())

    @classmethod
    def from_message(cls, message: Any, payload: bytes | memoryview | None = None) -> Frame:
        """Return what a message holds, unchecked; with the payload from elsewhere, if one is given."""
        return cls(
            name=message.name,
            shape=tuple(message.shape),
            box=Box(tuple(message.box_start), tuple(message.box_shape)),
            offset=message.offset,
            count=message.count,
            codec=message.codec,
            payload=message.payload if payload is None else payload,
            checksum=message.checksum,
        )

    @classmethod
    def from_bytes(cls, data: bytes, payload: memoryview | None = None) -> Frame:
        """Return the frame that bytes hold, checked; with the payload from elsewhere, if one is given.

        Raises:
            Refusal: they hold none, or a damaged one.
        """
        try:
            message = pb2.Frame.FromString(data)
        except DecodeError as error:
            raise Refusal("damaged", f"bytes that are not a frame: {error}") from error
        frame = cls.from_message(message, payload)
        frame.check()
        return frame


def cut(numel: int, frame_bytes: int, grid: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Yield (offset, count) of the frames of a box.

    Args:
        numel: number of elements of the box.
        frame_bytes: bytes of a frame, were it coded as fp32.
        grid: of the codec; frames have a whole number of what is coded together, so that cutting costs no byte.
    """
    grid = max(grid, BLOCK)
    step = max(frame_bytes // 4 // grid, 1) * grid
    for offset in range(0, numel, step):
        yield offset, min(step, numel - offset)


def payload_of(coded: bytes) -> bytes:
    """Return what a frame carries of elements that were coded one by one: nothing where all are +0."""
    return b"" if coded[:1] == b"\0" and not np.frombuffer(coded, dtype=np.uint8).any() else coded


def step_of(arrived: torch.Tensor, codec: str) -> torch.Tensor:
    """Return what a pseudo-gradient that has arrived adds to the values, as the server codes it; uses it up."""
    chosen, opposite = codec_of(codec), arrived.neg_()
    if chosen.grid == 1:
        return opposite
    # A codec of blocks may turn -0 into 0, which added to -0 is 0.
    return chosen.decode(chosen.encode(opposite), opposite.numel())


def _are_zero(values: torch.Tensor) -> bool:
    """Return whether all are +0: -0 is another value, and a tensor that has one seldom has nothing else."""
    # Most tensors are known by their first element.
    return not bool(values[:1]) and not bool(values.contiguous().view(torch.int32).any())


def _checksum(
    *, name: str, shape: tuple[int, ...], box: Box, offset: int, count: int, codec: str, payload: bytes | memoryview
) -> int:
    head = json.dumps([name, shape, box.start, box.shape, offset, count, codec]).encode()
    return crc32(payload, crc32(head))
