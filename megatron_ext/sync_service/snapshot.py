# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the values and the outer optimizer's states of one committed round, in one safetensors file.

Written and read tensor by tensor, so that the memory it takes does not depend on the model. A file appears under its
name only when it is whole and on the disk, and never changes afterwards: its head has a checksum of every tensor and
state, by which that is noticed when the next round is made of them.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.catalog import RESERVED, Catalog
from megatron_ext.sync_service.checksum import crc32
from megatron_ext.sync_service.frames import Box
from megatron_ext.sync_service.journal import sync_folder
from megatron_ext.sync_service.spares import SpareFiles

__all__ = ["CheckedRead", "Snapshot", "SnapshotWriter", "snapshot_name", "state_name"]

_LENGTH = struct.Struct("<Q")

_SUMS = "crc32"
"""In the metadata: 8 hexadecimal digits for each tensor and state, in their order."""


def snapshot_name(number: int) -> str:
    """Return the file name of a round's snapshot."""
    return f"round-{number:08d}.safetensors"


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
        states_of_all: Sequence[str] = (),
        spares: SpareFiles | None = None,
    ) -> None:
        """Begin the file beside its final place.

        Args:
            path: the final place.
            catalog: the tensors.
            states: names of the outer optimizer's states, each of the shape of its tensor.
            metadata: goes into the head of the file.
            states_of_all: names of states that tensors with owners have as well.
            spares: has a file to write over, perhaps.
        """
        self._path = path
        self._partial = path.with_suffix(".partial")
        names = [(spec.name, spec) for spec in catalog]
        # A peer that trains a tensor alone moves it by itself: there is no outer step, and no state of one.
        names += [(state_name(state, s.name), s) for state in states for s in catalog if not s.owners]
        names += [(state_name(state, s.name), s) for state in states_of_all for s in catalog]
        self._sums = {name: 0 for name, _ in names}
        self._head: dict[str, object] = {"__metadata__": {**metadata, _SUMS: _joined(self._sums)}}
        self._metadata = metadata
        self._overwritten: set[str] = set()
        self._missing = {name: spec.numel for name, spec in names}
        self._places: dict[str, tuple[int, int]] = {}
        position = 0
        for name, spec in names:
            end = position + 4 * spec.numel
            self._head[name] = {"dtype": "F32", "shape": list(spec.shape), "data_offsets": [position, end]}
            self._places[name] = (position, end)
            position = end
        head = self._packed_head()
        self._begin = len(head)
        self._size = len(head) + position
        self._partial.unlink(missing_ok=True)
        if spares is not None:
            spares.take(self._partial)
        self._partial.touch()
        self._file = self._partial.open("r+b", buffering=0)
        self._put(0, head)

    def write(self, name: str, values: torch.Tensor, first: int = 0) -> None:
        """Write the next block of a tensor, fp32 on the CPU; with the first one the tensor is begun, perhaps anew.

        Args:
            name: of the tensor or state.
            values: of the block.
            first: its first element.

        Raises:
            OSError: it could not be written.
        """
        position, end = self._places[name]
        data = _bytes_of(values)
        wanted = (end - position) // 4 - self._missing[name] if first else 0
        if first != wanted or position + 4 * first + len(data) > end:
            raise ValueError(f"{name} has {(end - position) // 4} elements: no {values.numel()} follow from {first} on")
        self._missing[name] = (end - position - len(data)) // 4 - first
        self._sums[name] = crc32(data, self._sums[name] if first else 0)
        self._put(self._begin + position + 4 * first, data)

    def read(self, name: str, offset: int = 0, count: int | None = None) -> torch.Tensor:
        """Return elements of a tensor that was written, as `Snapshot.read` does."""
        start, end = self._places[name]
        count = (end - start) // 4 - offset if count is None else count
        return _read(self._file.fileno(), self._begin + start + 4 * offset, count, f"{self._partial}: {name!r}")

    def overwrite(self, name: str, offset: int, values: torch.Tensor) -> None:
        """Write elements of a tensor again, fp32 on the CPU.

        Raises:
            OSError: they could not be written.
        """
        start, end = self._places[name]
        data = _bytes_of(values)
        if start + 4 * offset + len(data) > end:
            raise ValueError(f"{name} ends before element {offset + values.numel()}")
        self._overwritten.add(name)
        self._put(self._begin + start + 4 * offset, data)

    def sync(self) -> None:
        """Make what was written durable, still beside its final place."""
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            raise ValueError(f"tensor {min(missing)!r} was not written")
        for name in self._overwritten:
            self._sums[name] = crc32(_bytes_of(self.read(name)))
        self._put(0, self._packed_head())  # as long as before
        self._file.truncate(self._size)  # it may have been longer
        os.fsync(self._file.fileno())
        self._file.close()

    def publish(self) -> None:
        """Give the file its name."""
        os.replace(self._partial, self._path)
        sync_folder(self._path.parent)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _packed_head(self) -> bytes:
        text = json.dumps({**self._head, "__metadata__": {**self._metadata, _SUMS: _joined(self._sums)}}).encode()
        text += b" " * (-len(text) % 8)
        return _LENGTH.pack(len(text)) + text

    def _put(self, position: int, data: bytes | memoryview) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data, position)
            data, position = data[written:], position + written


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
            head = json.loads(self._file.read(length))
            self.metadata: dict[str, str] = head.get("__metadata__", {})
            self._entries = {name: entry for name, entry in head.items() if name != "__metadata__"}
            # Those of former releases have none.
            sums = self.metadata.get(_SUMS, "")
            self._sums = {name: int(sums[8 * at : 8 * at + 8], 16) for at, name in enumerate(self._entries) if sums}
            self._begin = _LENGTH.size + length
            size = self._begin + max(entry["data_offsets"][1] for entry in self._entries.values())
            if path.stat().st_size != size:
                raise ValueError(f"it has {path.stat().st_size} bytes instead of {size}")
        except (OSError, ValueError, struct.error, KeyError, TypeError) as error:
            raise UserError(f"{path}: cannot be read as a snapshot ({error}); restore it from a copy") from error

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """Let nobody write over the file until the end of the block."""
        with self._lock:
            self._readers += 1
        try:
            yield self
        finally:
            with self._lock:
                self._readers -= 1

    def remove(self, spares: SpareFiles) -> None:
        """Remove the file; whoever is reading it keeps its contents."""
        with self._lock:
            if self._readers:
                self.path.unlink(missing_ok=True)
            else:
                self.close()
                spares.keep(self.path)

    def read(
        self, name: str, offset: int = 0, count: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return elements of a tensor: fp32, 1-D, in memory of their own. They are not compared with the checksum.

        Args:
            name: of a tensor or a state.
            offset: first element.
            count: how many; all that follow when None.
            out: memory for them, fp32, 1-D on the CPU, no shorter; new memory when None.
        """
        start, end = self._entries[name]["data_offsets"]
        count = (end - start) // 4 - offset if count is None else count
        return _read(self._file.fileno(), self._begin + start + 4 * offset, count, f"{self.path}: {name!r}", out)

    def checked(self, name: str) -> CheckedRead:
        """Return what reads a whole tensor or state block by block."""
        start, end = self._entries[name]["data_offsets"]
        return CheckedRead(self, name, (end - start) // 4, self._sums.get(name))

    def read_bytes(self, name: str, offset: int, count: int) -> bytes:
        """Return elements of a tensor as the bytes that they are in the file, little-endian fp32."""
        start, _ = self._entries[name]["data_offsets"]
        data = os.pread(self._file.fileno(), 4 * count, self._begin + start + 4 * offset)
        if len(data) == 4 * count:
            return data
        return bytes(_bytes_of(self.read(name, offset, count)))  # a read may bring less than it was asked for

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor: fp32, 1-D, in row-major order."""
        shape = self._entries[name]["shape"]
        if not shape:
            return self.read(name)
        row = math.prod(shape[1:])
        rows = self.read(name, box.start[0] * row, box.shape[0] * row).view(box.shape[0], *shape[1:])
        return rows[(slice(None), *box.slices[1:])].contiguous().view(-1)


class CheckedRead:
    """Reads a tensor or state block by block, and compares the whole with its checksum as the last one is read."""

    def __init__(self, snapshot: Snapshot, name: str, numel: int, checksum: int | None) -> None:
        """Take the snapshot, the name, the number of elements, and the checksum if there is one."""
        self._snapshot, self._name, self._numel, self._checksum = snapshot, name, numel, checksum
        self._next = self._sum = 0

    def read(self, first: int, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the next block, as `Snapshot.read` does; that from 0 on begins anew.

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


def _joined(sums: dict[str, int]) -> str:
    return "".join(f"{value:08x}" for value in sums.values())


def _bytes_of(values: torch.Tensor) -> memoryview:
    return memoryview(values.detach().contiguous().view(-1).numpy()).cast("B")


def _read(handle: int, position: int, count: int, what: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return fp32 values of a file, 1-D, in memory of their own or at the beginning of `out`."""
    values = torch.empty(count, dtype=torch.float32) if out is None else out[:count]
    view, done = memoryview(values.numpy()).cast("B"), 0
    while done < len(view):
        got = os.preadv(handle, [view[done:]], position + done)
        if got == 0:
            raise OSError(f"{what}: the file ends in the middle")
        done += got
    return values
