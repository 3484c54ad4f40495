# SPDX-License-Identifier: Apache-2.0
"""The head of a snapshot: where each tensor and state is, and their checksums and its own."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.sync_service.protocol.catalog import RESERVED
from megatron_ext.sync_service.protocol.checksum import crc32

__all__ = [
    "LENGTH",
    "RECORD",
    "RECORD_REST",
    "Extent",
    "bytes_of",
    "checked_head",
    "packed_head",
    "read_elements",
    "sums_in",
]

LENGTH = struct.Struct("<Q")

SUMS = "crc32"
"""In the metadata: 8 hexadecimal digits for each tensor and state, in their order."""

_HEAD_SUM = b'"head_crc32": "'
"""In the metadata, before the 8 digits of the head's own checksum, for which these are zeros."""

RECORD, RECORD_REST = f"{RESERVED}record", f"{RESERVED}record.rest"
"""Names of the record, which is kept as bytes, with blanks where its room is larger; and of what has no room."""

_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class Extent:
    """Where a tensor or state is in a file."""

    begin: int
    """Position of its first byte, after the head."""

    shape: tuple[int, ...]
    """Of the tensor."""

    dtype: torch.dtype
    """Of its elements."""

    @classmethod
    def of_entry(cls, entry: dict[str, Any]) -> Extent:
        """Return what an entry of the head says.

        Raises:
            ValueError: its type is none of a snapshot's, or the place has not the size.
        """
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in _TYPES:
            raise ValueError(f"type {entry['dtype']!r} is none of a snapshot's")
        found = cls(begin, tuple(entry["shape"]), _TYPES[entry["dtype"]])
        if found.end != end:
            raise ValueError(f"{found.numel} elements of type {entry['dtype']} are said to be {end - begin} bytes")
        return found

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry in the header."""
        return {"dtype": _NAMES[self.dtype], "shape": list(self.shape), "data_offsets": [self.begin, self.end]}

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Position of what follows."""
        return self.at(self.numel)

    def at(self, element: int) -> int:
        """Return the position of an element."""
        return self.begin + self.dtype.itemsize * element


def packed_head(
    extents: Mapping[str, Extent], sums: Mapping[str, int], metadata: Mapping[str, str], nbytes: int = 0
) -> bytes:
    """Return a head with its length before it.

    Args:
        extents: where every tensor and state is, in their order.
        sums: their checksums, in the same order.
        metadata: what else it says.
        nbytes: how long it has to be at least, with its length.
    """
    entries = {name: extent.entry for name, extent in extents.items()}
    joined = "".join(f"{value:08x}" for value in sums.values())
    text = json.dumps({"__metadata__": {"head_crc32": 8 * "0", **metadata, SUMS: joined}, **entries}).encode()
    text = text.ljust(nbytes - LENGTH.size)
    text += b" " * (-len(text) % 8)
    return LENGTH.pack(len(text)) + _with_head_sum(text, b"%08x" % crc32(memoryview(text)))


def checked_head(text: bytes) -> dict[str, Any]:
    """Return what a head says.

    Raises:
        ValueError: it is not what was written; a name that is damaged is a state that is lost.
    """
    _, key, after = text.partition(_HEAD_SUM)
    # Those of former releases have none.
    if key and after[:8] != b"%08x" % crc32(memoryview(_with_head_sum(text, 8 * b"0"))):
        raise ValueError("its head is damaged")
    found: dict[str, Any] = json.loads(text)
    return found


def sums_in(metadata: Mapping[str, str], extents: Mapping[str, Extent]) -> dict[str, int]:
    """Return the checksums of tensors and states; none of a file of former releases, which have none."""
    sums = metadata.get(SUMS, "")
    return {name: int(sums[8 * at : 8 * at + 8], 16) for at, name in enumerate(extents) if sums}


def _with_head_sum(text: bytes, digits: bytes) -> bytes:
    """Return the text of a head with another checksum of its own; as it is where it has none."""
    before, key, after = text.partition(_HEAD_SUM)
    return before + key + digits + after[len(digits) :] if key else text


def bytes_of(values: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, without a copy where it has no gaps."""
    return memoryview(values.detach().contiguous().view(-1).view(torch.uint8).numpy())


def read_elements(
    handle: int,
    begin: int,
    extent: Extent,
    first: int,
    count: int | None,
    what: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return elements from a file whose head ends at `begin`, 1-D, in memory of their own or at the front of `out`."""
    count = extent.numel - first if count is None else count
    values = torch.empty(count, dtype=extent.dtype) if out is None else out[:count]
    view, position, done = bytes_of(values), begin + extent.at(first), 0
    while done < len(view):
        got = os.preadv(handle, [view[done:]], position + done)
        if got == 0:
            raise OSError(f"{what}: the file ends in the middle")
        done += got
    return values
