# SPDX-License-Identifier: Apache-2.0
"""Messages: what goes from one rank to another in a switch, in which pieces and in which order.

Sender and receiver derive the same messages from the plan, each on its own; nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.planning.plan import Move
from megatron_ext.hot_switch.transfer.windows import Window, cut_box, join_boxes, window_of
from megatron_ext.params import GlobalTensor

__all__ = ["DEFAULT_SIZES", "Message", "MessagePart", "MessageSizes", "messages_between", "moved_dtype"]


@dataclass(frozen=True, kw_only=True)
class MessageSizes:
    """When a part is worth a message of its own, and how large others become. The same on all ranks."""

    direct_bytes: int
    """A part of this size or more gets its own message, if it is one run of memory at either end; it is not
    copied where it is."""

    chunk_bytes: int
    """Largest message that is copied at either end, and the most of such bytes in flight between two ranks in one
    direction and round."""

    round_bytes: int = 64 << 20
    """The most bytes of any kind in flight between two ranks in one direction and round, a single message may be
    larger. What is used first arrives while the rest travels."""

    def __post_init__(self) -> None:
        """Refuse sizes that no message can have."""
        if self.direct_bytes < 0:
            raise UserError(f"direct_bytes must not be negative, got {self.direct_bytes}")
        if self.chunk_bytes < 8:
            raise UserError(f"chunk_bytes must be at least 8, the largest element, got {self.chunk_bytes}")
        if self.round_bytes < 1:
            raise UserError(f"round_bytes must be at least 1, got {self.round_bytes}")


DEFAULT_SIZES = {
    # direct_bytes from benchmarks/switch_sizes.py; chunk_bytes from benchmarks/switch.py, where 1 MiB was slower.
    "gloo": MessageSizes(direct_bytes=128 << 10, chunk_bytes=4 << 20),
    # Not measured: small operations cost NCCL more, and copies on a GPU cost less.
    "nccl": MessageSizes(direct_bytes=1 << 20, chunk_bytes=8 << 20),
}
"""Sizes by the backend of the process group."""


@dataclass(frozen=True, kw_only=True)
class MessagePart:
    """One box of one tensor in flight. Both windows have the same shape."""

    source_name: str
    """The tensor's name on the sender."""

    target_name: str
    """Its name on the receiver."""

    source: Window
    """Where the box lies in the sender's local tensor."""

    target: Window
    """Where it lies in the receiver's local tensor."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one send carries: its parts one behind the other, each in row-major order."""

    parts: tuple[MessagePart, ...]
    """At least one."""

    dtype: torch.dtype
    """Of all parts."""

    round: int
    """From 0. A message is in flight in the same round at both ends."""

    @cached_property
    def nbytes(self) -> int:
        """Size of the message."""
        return sum(part.source.numel for part in self.parts) * self.dtype.itemsize

    @cached_property
    def leaves_directly(self) -> bool:
        """Whether it is one run of the sender's memory."""
        return len(self.parts) == 1 and self.parts[0].source.is_run

    @cached_property
    def lands_directly(self) -> bool:
        """Whether it is one run of the receiver's memory."""
        return len(self.parts) == 1 and self.parts[0].target.is_run


def messages_between(moves: Sequence[Move], sizes: MessageSizes, *, gradients: bool = False) -> tuple[Message, ...]:
    """Return the messages from one rank to another, in order.

    Args:
        moves: one entry of `SwitchPlan.sends`, or of the receiver's `SwitchPlan.receives`.
        sizes: the same at both ends.
        gradients: gradients of the parameters move, in fp32, and are added at the receiver; no buffers move.
    """
    packed: dict[torch.dtype, list[MessagePart]] = {}
    ordered: list[tuple[torch.dtype, list[MessagePart]]] = []
    for tensor, of_tensor in groupby(moves, key=lambda move: move.tensor):
        dtype = moved_dtype(tensor, gradients=gradients)
        if dtype is None:
            continue
        limit = sizes.chunk_bytes // dtype.itemsize
        for part, pieces in _parts(tuple(of_tensor), limit):
            is_run = part.source.is_run, part.target.is_run
            if part.source.numel * dtype.itemsize >= sizes.direct_bytes and any(is_run):
                uncut = all(is_run) and not gradients
                ordered += [(dtype, [piece]) for piece in ((part,) if uncut else pieces)]
                continue
            for piece in pieces:
                pack = packed.get(dtype, [])
                if not pack or sum(other.source.numel for other in pack) + piece.source.numel > limit:
                    # A full pack stays where it began.
                    pack = packed[dtype] = []
                    ordered.append((dtype, pack))
                pack.append(piece)
    return tuple(_in_rounds(ordered, sizes, gradients))


def moved_dtype(tensor: GlobalTensor, *, gradients: bool) -> torch.dtype | None:
    """Return the type in which a tensor, or its gradient, moves; None for a buffer, which has no gradient."""
    if not gradients:
        return tensor.dtype
    return None if tensor.kind == "buffer" else torch.float32


def _parts(moves: Sequence[Move], limit: int) -> Iterable[tuple[MessagePart, list[MessagePart]]]:
    """Yield the parts of what moves of one tensor, each whole and cut into pieces of at most `limit` elements."""
    for box in join_boxes(box for move in moves for box in move.boxes):
        whole, *pieces = [
            MessagePart(
                source_name=moves[0].source_name,
                target_name=moves[0].target_name,
                source=window_of(moves[0].source_shape, piece.source_start, piece.shape),
                target=window_of(moves[0].target_shape, piece.target_start, piece.shape),
            )
            for piece in (box, *cut_box(box, limit))
        ]
        yield whole, pieces


def _in_rounds(
    ordered: Iterable[tuple[torch.dtype, list[MessagePart]]], sizes: MessageSizes, gradients: bool
) -> Iterable[Message]:
    """Give messages their rounds: each has at most `chunk_bytes` of messages that are copied at either end."""
    number, copied_bytes, all_bytes = 0, 0, 0
    for dtype, parts in ordered:
        message = Message(parts=tuple(parts), dtype=dtype, round=number)
        is_copied = not (message.leaves_directly and message.lands_directly) or gradients
        copied_bytes += message.nbytes if is_copied else 0
        all_bytes += message.nbytes
        if copied_bytes > sizes.chunk_bytes or all_bytes > sizes.round_bytes:
            if all_bytes > message.nbytes:
                number += 1
                message = Message(parts=tuple(parts), dtype=dtype, round=number)
            copied_bytes, all_bytes = message.nbytes if is_copied else 0, message.nbytes
        yield message
