# SPDX-License-Identifier: Apache-2.0
"""Writing a snapshot."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron_ext.sync_service.disk.durable import sync_path
from megatron_ext.sync_service.disk.snapshot_head import (
    RECORD,
    RECORD_REST,
    Extent,
    bytes_of,
    packed_head,
    read_elements,
)
from megatron_ext.sync_service.disk.snapshot_names import state_name
from megatron_ext.sync_service.disk.spares import SpareFiles
from megatron_ext.sync_service.disk.writeback import Writeback
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.checksum import crc32

__all__ = ["SnapshotWriter"]

_ROOM_BYTES = 64
"""Rooms are multiples of it, so that values lie as they would without."""

_LONGEST_RECORD = 10**12
"""Bytes of what has no room: the head, which is written before its length is known, has room for as many digits."""


class SnapshotWriter:
    """Writes a snapshot; tensors come in any order, the blocks of each in theirs."""

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        states: Sequence[str],
        metadata: dict[str, str],
        states_of_all: Mapping[str, torch.dtype] | None = None,
        spares: SpareFiles | None = None,
        record_bytes: int = 0,
    ) -> None:
        """Begin the file next to its final path.

        Args:
            path: the final place.
            catalog: the tensors.
            states: names of the outer optimizer's states, each of the shape of its tensor, fp32.
            metadata: goes into the head of the file.
            states_of_all: states that tensors with owners have as well, and their types.
            spares: has a file to write over, perhaps.
            record_bytes: about how long the record will be.
        """
        self._path = path
        self._partial = path.with_suffix(".partial")
        names = [(spec.name, spec, torch.float32) for spec in catalog]
        # A peer that trains a tensor alone moves it by itself: there is no outer step, and no state of one.
        names += [(state_name(name, s.name), s, torch.float32) for name in states for s in catalog if not s.owners]
        names += [(state_name(name, s.name), s, kind) for name, kind in (states_of_all or {}).items() for s in catalog]
        self._room = -(-record_bytes // _ROOM_BYTES) * _ROOM_BYTES
        self._sums = {RECORD: 0} if self._room else {}
        self._sums |= {name: 0 for name, _, _ in names}
        self._metadata = metadata
        self._head_bytes = 0
        self._overwritten: set[str] = set()
        self._missing = {name: spec.numel for name, spec, _ in names}
        self._extents = {RECORD: Extent(0, (self._room,), torch.uint8)} if self._room else {}
        position = self._room
        for name, spec, dtype in names:
            self._extents[name] = Extent(position, spec.shape, dtype)
            position = self._extents[name].end
        self._head_bytes = len(self._packed_head(Extent(position, (_LONGEST_RECORD,), torch.uint8)))
        head = self._packed_head()
        self._begin = len(head)
        self._size = len(head) + position
        self._partial.unlink(missing_ok=True)
        if spares is not None:
            spares.take(self._partial)
        self._partial.touch()
        self._file = self._partial.open("r+b", buffering=0)
        self._writeback = Writeback()
        self._put(0, head)

    def write(self, name: str, values: torch.Tensor, first: int = 0) -> None:
        """Write the next block of a tensor; with the first one the tensor begins, perhaps again.

        Args:
            name: of the tensor or state.
            values: of the block, on the CPU, fp32 or what the state is kept as.
            first: its first element.

        Raises:
            OSError: it could not be written.
        """
        extent = self._extents[name]
        wanted = extent.numel - self._missing[name] if first else 0
        if first != wanted or first + values.numel() > extent.numel:
            raise ValueError(f"{name} has {extent.numel} elements: no {values.numel()} follow from {first} on")
        if values.dtype != extent.dtype:
            raise ValueError(f"{name} is kept as {extent.dtype}, not as {values.dtype}")
        data = bytes_of(values)
        self._missing[name] = extent.numel - first - values.numel()
        self._sums[name] = crc32(data, self._sums[name] if first else 0)
        self._put(self._begin + extent.at(first), data)

    def read(self, name: str, offset: int = 0, count: int | None = None) -> torch.Tensor:
        """Return elements of a tensor that was written, as `Snapshot.read` does."""
        extent, what = self._extents[name], f"{self._partial}: {name!r}"
        return read_elements(self._file.fileno(), self._begin, extent, offset, count, what)

    def overwrite(self, name: str, offset: int, values: torch.Tensor) -> None:
        """Write elements of a tensor again, fp32 on the CPU.

        Raises:
            OSError: they could not be written.
        """
        extent = self._extents[name]
        if offset + values.numel() > extent.numel:
            raise ValueError(f"{name} ends before element {offset + values.numel()}")
        self._overwritten.add(name)
        self._put(self._begin + extent.at(offset), bytes_of(values))

    def sync(self) -> None:
        """Make what was written durable, still next to its final path."""
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            raise ValueError(f"tensor {min(missing)!r} was not written")
        for name in self._overwritten:
            self._sums[name] = crc32(bytes_of(self.read(name)))
        self._put(0, self._packed_head())  # as long as before
        self._file.truncate(self._size)  # it may have been longer
        os.fsync(self._file.fileno())

    def publish(self, record: bytes = b"") -> None:
        """Give the file its name.

        Args:
            record: its record of the run; none when empty.

        Raises:
            OSError: the record could not be written; the file has not its name.
        """
        front, rest = record[: self._room].ljust(self._room), record[self._room :]
        extent = Extent(self._size - self._begin, (len(rest),), torch.uint8) if rest else None
        if front:
            self._sums[RECORD] = crc32(memoryview(front))
            self._put(self._begin, front)
        if rest:
            self._sums[RECORD_REST] = crc32(memoryview(rest))
            self._put(self._size, rest)
        if front or rest:
            self._put(0, self._packed_head(extent))
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self._path)
        sync_path(self._path.parent)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _packed_head(self, rest: Extent | None = None) -> bytes:
        """Return the head, once its length is known always of that."""
        extents, sums = dict(self._extents), dict(self._sums)
        if rest is not None:
            extents[RECORD_REST] = rest
            sums.setdefault(RECORD_REST, 0)
        return packed_head(extents, sums, self._metadata, self._head_bytes)

    def _put(self, position: int, data: bytes | memoryview) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data, position)
            data, position = data[written:], position + written
            self._writeback.wrote(self._file.fileno(), written)
