# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the values and the outer optimizer's states of one committed round, in one safetensors file.

Written and read tensor by tensor, so that the memory it takes does not depend on the model. A file appears under its
name only when it is whole and on the disk, and does not change while it has it or anybody reads it: its head has a
checksum of every tensor and state, by which that is noticed when the next round is made of them. Before them may be the
record of the run (`run_record`), as bytes; it is written last, in room that was left for it, and what of it has no room
comes after them.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.protocol.catalog import RESERVED, Catalog
from megatron_ext.sync_service.protocol.checksum import crc32
from megatron_ext.sync_service.protocol.frames import Box
from megatron_ext.sync_service.values.durable import described, lacks_descriptors, sync_path
from megatron_ext.sync_service.values.spares import SpareFiles
from megatron_ext.sync_service.values.writeback import Writeback

__all__ = [
    "CheckedRead",
    "Snapshot",
    "SnapshotWriter",
    "newest_of",
    "snapshot_name",
    "snapshot_number",
    "state_name",
]

_LENGTH = struct.Struct("<Q")

_SUMS = "crc32"
"""In the metadata: 8 hexadecimal digits for each tensor and state, in their order."""

_HEAD_SUM = b'"head_crc32": "'
"""In the metadata, before the 8 digits of the head's own checksum, for which these are zeros."""

_RECORD, _RECORD_REST = f"{RESERVED}record", f"{RESERVED}record.rest"
"""Names of the record, which is kept as bytes, with blanks where its room is larger; and of what has no room."""

_ROOM_BYTES = 64
"""Rooms are multiples of it, so that values lie as they would without."""

_LONGEST_RECORD = 10**12
"""Bytes of what has no room: the head, which is written before its length is known, has room for as many digits."""

_CHECKED_ELEMENTS = 1 << 20
"""That are read at a time where nothing but the checksums is looked at."""

_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class _Extent:
    """Where a tensor or state is in a file."""

    begin: int
    """Position of its first byte, after the head."""

    shape: tuple[int, ...]
    """Of the tensor."""

    dtype: torch.dtype
    """Of its elements."""

    @classmethod
    def of_entry(cls, entry: dict[str, Any]) -> _Extent:
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


def snapshot_name(number: int) -> str:
    """Return the file name of a round's snapshot."""
    return f"round-{number:08d}.safetensors"


def snapshot_number(name: str) -> int | None:
    """Return of which round a file is the snapshot, by its name; None when it is none."""
    found = re.fullmatch(r"round-(\d{8,})\.safetensors", name)
    return None if found is None else int(found[1])


def newest_of(names: Iterable[str]) -> int:
    """Return the newest round of which one of these files is the snapshot; -1 when none is."""
    return max((number for name in names if (number := snapshot_number(name)) is not None), default=-1)


def state_name(state: str, name: str) -> str:
    """Return under which name a tensor's state of the outer optimizer is kept."""
    return f"{RESERVED}{state}:{name}"


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
        self._sums = {_RECORD: 0} if self._room else {}
        self._sums |= {name: 0 for name, _, _ in names}
        self._metadata = metadata
        self._head_bytes = 0
        self._overwritten: set[str] = set()
        self._missing = {name: spec.numel for name, spec, _ in names}
        self._extents = {_RECORD: _Extent(0, (self._room,), torch.uint8)} if self._room else {}
        position = self._room
        for name, spec, dtype in names:
            self._extents[name] = _Extent(position, spec.shape, dtype)
            position = self._extents[name].end
        self._head_bytes = len(self._packed_head(_Extent(position, (_LONGEST_RECORD,), torch.uint8)))
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
        data = _bytes_of(values)
        self._missing[name] = extent.numel - first - values.numel()
        self._sums[name] = crc32(data, self._sums[name] if first else 0)
        self._put(self._begin + extent.at(first), data)

    def read(self, name: str, offset: int = 0, count: int | None = None) -> torch.Tensor:
        """Return elements of a tensor that was written, as `Snapshot.read` does."""
        return _read(self._file.fileno(), self._begin, self._extents[name], offset, count, f"{self._partial}: {name!r}")

    def overwrite(self, name: str, offset: int, values: torch.Tensor) -> None:
        """Write elements of a tensor again, fp32 on the CPU.

        Raises:
            OSError: they could not be written.
        """
        extent = self._extents[name]
        if offset + values.numel() > extent.numel:
            raise ValueError(f"{name} ends before element {offset + values.numel()}")
        self._overwritten.add(name)
        self._put(self._begin + extent.at(offset), _bytes_of(values))

    def sync(self) -> None:
        """Make what was written durable, still next to its final path."""
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            raise ValueError(f"tensor {min(missing)!r} was not written")
        for name in self._overwritten:
            self._sums[name] = crc32(_bytes_of(self.read(name)))
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
        extent = _Extent(self._size - self._begin, (len(rest),), torch.uint8) if rest else None
        if front:
            self._sums[_RECORD] = crc32(memoryview(front))
            self._put(self._begin, front)
        if rest:
            self._sums[_RECORD_REST] = crc32(memoryview(rest))
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

    def _packed_head(self, rest: _Extent | None = None) -> bytes:
        """Return the head, once its length is known always of that."""
        entries = {name: extent.entry for name, extent in self._extents.items()}
        sums = dict(self._sums)
        if rest is not None:
            entries[_RECORD_REST] = rest.entry
            sums.setdefault(_RECORD_REST, 0)
        metadata = {"head_crc32": 8 * "0", **self._metadata, _SUMS: _joined(sums)}
        text = json.dumps({"__metadata__": metadata, **entries}).encode()
        text = text.ljust(self._head_bytes - _LENGTH.size)
        text += b" " * (-len(text) % 8)
        return _LENGTH.pack(len(text)) + _with_head_sum(text, b"%08x" % crc32(memoryview(text)))

    def _put(self, position: int, data: bytes | memoryview) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data, position)
            data, position = data[written:], position + written
            self._writeback.wrote(self._file.fileno(), written)


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
            (length,) = _LENGTH.unpack(self._file.read(_LENGTH.size))
            if length > path.stat().st_size:
                raise ValueError("its head is longer than the file")
            head = _checked_head(self._file.read(length))
            self.metadata: dict[str, str] = head.get("__metadata__", {})
            entries = {name: entry for name, entry in head.items() if name != "__metadata__"}
            self._extents = {name: _Extent.of_entry(entry) for name, entry in entries.items()}
            # Those of former releases have none.
            sums = self.metadata.get(_SUMS, "")
            self._sums = {name: int(sums[8 * at : 8 * at + 8], 16) for at, name in enumerate(self._extents) if sums}
            self._begin = _LENGTH.size + length
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
        return _read(self._file.fileno(), self._begin, extent, offset, count, what, out)

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
        names = [name for name in (_RECORD, _RECORD_REST) if name in self]
        parts = [self.checked(name).read(0, self._extents[name].numel).numpy().tobytes() for name in names]
        return b"".join(parts).strip()

    def read_bytes(self, name: str, offset: int, count: int) -> bytes:
        """Return elements of a tensor as the bytes that they are in the file, little-endian."""
        extent = self._extents[name]
        nbytes = extent.dtype.itemsize * count
        data = os.pread(self._file.fileno(), nbytes, self._begin + extent.at(offset))
        if len(data) == nbytes:
            return data
        return bytes(_bytes_of(self.read(name, offset, count)))  # a read may bring less than it was asked for

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
        self._sum = crc32(_bytes_of(found), self._sum if first else 0)
        self._next = first + count
        if self._next == self._numel and self._checksum not in (None, self._sum):
            raise OSError(
                f"{self._snapshot.path}: {self._name!r} is damaged on the disk; restore the file from a copy, and "
                "start the server again"
            )
        return found


def _with_head_sum(text: bytes, digits: bytes) -> bytes:
    """Return the text of a head with another checksum of its own; as it is where it has none."""
    before, key, after = text.partition(_HEAD_SUM)
    return before + key + digits + after[len(digits) :] if key else text


def _checked_head(text: bytes) -> dict[str, Any]:
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


def _joined(sums: dict[str, int]) -> str:
    return "".join(f"{value:08x}" for value in sums.values())


def _bytes_of(values: torch.Tensor) -> memoryview:
    return memoryview(values.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _read(
    handle: int,
    begin: int,
    extent: _Extent,
    first: int,
    count: int | None,
    what: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return elements from a file whose head ends at `begin`, 1-D, in memory of their own or at the front of `out`."""
    count = extent.numel - first if count is None else count
    values = torch.empty(count, dtype=extent.dtype) if out is None else out[:count]
    view, position, done = _bytes_of(values), begin + extent.at(first), 0
    while done < len(view):
        got = os.preadv(handle, [view[done:]], position + done)
        if got == 0:
            raise OSError(f"{what}: the file ends in the middle")
        done += got
    return values
