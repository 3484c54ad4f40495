# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the values and the outer optimizer's states of one committed round, in one safetensors file.

Written and read tensor by tensor, so that the memory it takes does not depend on the model. A file appears under its
name only when it is whole and on the disk, and does not change while it has it or anybody reads it: its head has a
checksum of every tensor and state, by which that is noticed when the next round is made of them. Before them may be the
record of the run (`run_record`), as bytes; it is written last, in room that was left for it, and what of it has no room
comes after them.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.durable import described, lacks_descriptors
from megatron_ext.sync_service.disk.snapshot_head import (
    LENGTH,
    RECORD,
    RECORD_REST,
    Extent,
    bytes_of,
    checked_head,
    read_elements,
    sums_in,
)
from megatron_ext.sync_service.disk.spares import SpareFiles
from megatron_ext.sync_service.protocol.catalog import RESERVED
from megatron_ext.sync_service.protocol.checksum import crc32
from megatron_ext.sync_service.protocol.frames import Box

__all__ = ["CheckedRead", "Snapshot"]

_CHECKED_ELEMENTS = 1 << 20
"""That are read at a time where nothing but the checksums is looked at."""


class Snapshot:
    """A snapshot, for reading. May be read from several threads.

    Attributes:
        sources: identities of the contributions that are all of a tensor's values, by its name, as far as this process
            has made the round.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            UserError: it is missing or not one of ours.
        """
        self.path = path
        self.sources: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._readers = 0
        try:
            self._file = path.open("rb", buffering=0)
            (length,) = LENGTH.unpack(self._file.read(LENGTH.size))
            if length > path.stat().st_size:
                raise ValueError("its head is longer than the file")
            head = checked_head(self._file.read(length))
            self.metadata: dict[str, str] = head.get("__metadata__", {})
            entries = {name: entry for name, entry in head.items() if name != "__metadata__"}
            self._extents = {name: Extent.of_entry(entry) for name, entry in entries.items()}
            self._sums = sums_in(self.metadata, self._extents)
            self._begin = LENGTH.size + length
            size = self._begin + max(extent.end for extent in self._extents.values())
            if path.stat().st_size != size:
                raise ValueError(f"it has {path.stat().st_size} bytes instead of {size}")
        except (OSError, ValueError, struct.error, KeyError, TypeError) as error:
            if isinstance(error, OSError) and lacks_descriptors(error):
                raise UserError(f"{path}: cannot be opened: {described(error)}") from error
            raise UserError(f"{path}: cannot be read as a snapshot ({error}); restore it from a copy") from error

    def __contains__(self, name: str) -> bool:
        return name in self._extents

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """Keep the file from being written over until the end of the block."""
        with self._lock:
            self._readers += 1
        try:
            yield self
        finally:
            with self._lock:
                self._readers -= 1

    def remove(self, spares: SpareFiles) -> None:
        """Remove the file; its readers keep its contents."""
        with self._lock:
            if self._readers:
                self.path.unlink(missing_ok=True)
            else:
                self.close()
                spares.keep(self.path)

    def read(
        self, name: str, offset: int = 0, count: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return elements of a tensor, 1-D, as they are kept, in memory of their own. No checksum is looked at.

        Args:
            name: of a tensor or a state.
            offset: first element.
            count: how many; all that follow when None.
            out: memory for them, of their type, 1-D on the CPU, no shorter; new memory when None.
        """
        extent, what = self._extents[name], f"{self.path}: {name!r}"
        return read_elements(self._file.fileno(), self._begin, extent, offset, count, what, out)

    def dtype(self, name: str) -> torch.dtype:
        """Return as what a tensor or state is kept."""
        return self._extents[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's or state's shape."""
        return self._extents[name].shape

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors, without those of states and the record."""
        return tuple(name for name in self._extents if not name.startswith(RESERVED))

    def checked(self, name: str) -> CheckedRead:
        """Return what reads a whole tensor or state block by block."""
        return CheckedRead(self, name, self._extents[name].numel, self._sums.get(name))

    def check(self) -> None:
        """Read everything, and compare it with the checksums.

        Raises:
            OSError: it cannot be read, or is not what was written.
        """
        for name, extent in self._extents.items():
            reader = self.checked(name)
            for first in range(0, extent.numel, _CHECKED_ELEMENTS):
                reader.read(first, min(_CHECKED_ELEMENTS, extent.numel - first))

    @property
    def record(self) -> bytes:
        """The file's record of the run; empty where there is none, as in those of shards.

        Raises:
            OSError: it cannot be read, or is not what was written.
        """
        names = [name for name in (RECORD, RECORD_REST) if name in self]
        parts = [self.checked(name).read(0, self._extents[name].numel).numpy().tobytes() for name in names]
        return b"".join(parts).strip()

    def read_bytes(self, name: str, offset: int, count: int) -> bytes:
        """Return elements of a tensor as the bytes that they are in the file, little-endian."""
        extent = self._extents[name]
        nbytes = extent.dtype.itemsize * count
        data = os.pread(self._file.fileno(), nbytes, self._begin + extent.at(offset))
        if len(data) == nbytes:
            return data
        return bytes(bytes_of(self.read(name, offset, count)))  # a read may bring less than it was asked for

    def read_box(self, name: str, box: Box, offset: int = 0, count: int | None = None) -> torch.Tensor:
        """Return elements of a box of a tensor as they are kept: 1-D, in row-major order of the box.

        Args:
            name: of a tensor or a state.
            box: the box.
            offset: first element; only the rows of the tensor's first axis that have elements wanted are read.
            count: how many; all that follow when None.
        """
        shape = self._extents[name].shape
        if not shape:
            return self.read(name)
        count = box.numel - offset if count is None else count
        row, row_of_box = math.prod(shape[1:]), math.prod(box.shape[1:])
        first, last = offset // row_of_box, (offset + count - 1) // row_of_box
        rows = self.read(name, (box.start[0] + first) * row, (last + 1 - first) * row)
        found = rows.view(-1, *shape[1:])[(slice(None), *box.slices[1:])].reshape(-1)
        return found[offset - first * row_of_box :][:count]


class CheckedRead:
    """Reads a tensor or state block by block, and compares the whole with its checksum as the last one is read."""

    def __init__(self, snapshot: Snapshot, name: str, numel: int, checksum: int | None) -> None:
        """Take the snapshot, the name, the number of elements, and the checksum if there is one."""
        self._snapshot, self._name, self._numel, self._checksum = snapshot, name, numel, checksum
        self._next = self._sum = 0

    def read(self, first: int, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the next block, as `Snapshot.read` does; that from 0 starts again.

        Raises:
            OSError: it cannot be read, or the whole is not what was written.
        """
        if first != (self._next if first else 0):
            raise ValueError(f"{self._name}: the block from {self._next} on is the next one, not that from {first}")
        found = self._snapshot.read(self._name, first, count, out)
        self._sum = crc32(bytes_of(found), self._sum if first else 0)
        self._next = first + count
        if self._next == self._numel and self._checksum not in (None, self._sum):
            raise OSError(
                f"{self._snapshot.path}: {self._name!r} is damaged on the disk; restore the file from a copy, and "
                "start the server again"
            )
        return found
