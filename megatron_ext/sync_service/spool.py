# SPDX-License-Identifier: Apache-2.0
"""The spool: what the peers have uploaded for the open round, on the disk until the round is committed.

One file per contribution, frames one after the other as they come, each behind its length. Their checksums are checked
when they arrive, when a restarted server finds them, and when they are read to be reduced.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron_ext.sync_service.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.coverage import Coverage
from megatron_ext.sync_service.frames import Box, Frame, whole_box
from megatron_ext.sync_service.journal import sync_folder
from megatron_ext.sync_service.refusal import Refusal

__all__ = ["Contribution", "Discarded", "Spool"]

_LENGTH = struct.Struct("<I")
_MAX_RECORD = 8 << 20

_Key = tuple[Box, int]


class Discarded(Exception):
    """The contribution is no longer wanted: its round was closed, or another process has taken its peer's place."""


class Contribution:
    """What one peer has uploaded for one round. May be appended to from several threads."""

    def __init__(self, path: Path, catalog: Catalog, codec: str) -> None:
        """Open the file, or create it, and find the frames that are in it; a last one that is cut off is dropped."""
        self._catalog = catalog
        self._codec = codec
        self._lock = threading.Lock()
        self._index: dict[str, dict[_Key, tuple[int, int, int]]] = {}
        self._coverage: dict[str, Coverage] = {}
        self._discarded = False
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._size = 0
        for frame, end in self._records():
            self._take(frame, self._size, end)
            self._size = end
        self._file.truncate(self._size)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self._size

    @property
    def frames(self) -> int:
        """Frames in the file."""
        return sum(map(len, self._index.values()))

    def append(self, frame: Frame) -> bool:
        """Write a checked frame unless it is there.

        Returns:
            Whether it was new.

        Raises:
            Refusal: it does not belong here, or contradicts one that is there.
            Discarded: the contribution is no longer wanted.
            OSError: it could not be written; nothing has changed.
        """
        frame.check_against(self._catalog[frame.name])
        if frame.codec != self._codec:
            raise Refusal("invalid", f"codec of a frame is {frame.codec!r}; the run's is {self._codec!r}")
        data = frame.to_message().SerializeToString()
        with self._lock:
            if self._discarded:
                raise Discarded
            known = self._index.get(frame.name, {}).get(_key(frame))
            if known is not None and known[2] == frame.checksum:
                return False
            if known is not None:
                raise Refusal("invalid", f"a frame differs from the one that has arrived before ({frame.place})")
            self._coverage.setdefault(frame.name, Coverage()).check(frame)
            record = _LENGTH.pack(len(data)) + data
            try:
                written = self._file.write(record)
                if written != len(record):
                    raise OSError(errno.ENOSPC, "the disk is full", str(self._path))
            except OSError:
                self._file.truncate(self._size)
                raise
            self._take(frame, self._size, self._size + len(record))
            self._size += len(record)
        return True

    def missing(self, index: int | None) -> str | None:
        """Return in words what has not arrived of what a peer has to upload, None when all has.

        Args:
            index: of the peer; None for one that has to upload everything.
        """
        for spec in self._catalog:
            covered = self._coverage[spec.name].covered if spec.name in self._coverage else 0
            is_wanted = index is None or spec.is_trained_by(index)
            if is_wanted and covered != spec.numel:
                return f"{covered} of the {spec.numel} elements of tensor {spec.name!r} have arrived"
            if not is_wanted and covered:
                return f"tensor {spec.name!r} is not this peer's to train"
        return None

    def sync(self) -> None:
        """Make everything durable."""
        os.fsync(self._file.fileno())
        sync_folder(self._path.parent)

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """Return what was uploaded of a tensor, decoded: fp32, 1-D, memory of its own.

        Raises:
            Refusal: the file is damaged.
        """
        total = torch.empty(spec.shape, dtype=torch.float32)
        for box, entries in self._by_box(spec.name).items():
            is_whole = box == whole_box(spec.shape)
            values = total.view(-1) if is_whole else torch.empty(box.numel, dtype=torch.float32)
            for offset, start, length in entries:
                frame = self._load(start, length)
                if (frame.name, *_key(frame)) != (spec.name, box, offset):
                    raise Refusal("damaged", f"another frame is where {spec.name!r} should be ({frame.place})")
                values[offset : offset + frame.count] = frame.values()
            if not is_whole:
                total[box.slices] = values.view(box.shape)
        return total.view(-1)

    def discard(self) -> None:
        """Refuse further frames, and remove the file."""
        with self._lock:
            self._discarded = True
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _take(self, frame: Frame, start: int, end: int) -> None:
        self._index.setdefault(frame.name, {})[_key(frame)] = (start, end - start, frame.checksum)
        self._coverage.setdefault(frame.name, Coverage()).add(frame)

    def _by_box(self, name: str) -> dict[Box, list[tuple[int, int, int]]]:
        """Return (offset, start, length) of the frames of a tensor, by their box."""
        found: dict[Box, list[tuple[int, int, int]]] = {}
        for (box, offset), (start, length, _) in self._index.get(name, {}).items():
            found.setdefault(box, []).append((offset, start, length))
        return found

    def _load(self, start: int, length: int) -> Frame:
        record = os.pread(self._file.fileno(), length, start)
        return Frame.from_bytes(record[_LENGTH.size :])

    def _records(self) -> Iterator[tuple[Frame, int]]:
        """Yield the frames in the file with their ends, up to the first that is not whole."""
        position, size = 0, self._path.stat().st_size
        while position + _LENGTH.size <= size:
            (length,) = _LENGTH.unpack(os.pread(self._file.fileno(), _LENGTH.size, position))
            end = position + _LENGTH.size + length
            if length > _MAX_RECORD or end > size:
                return
            try:
                frame = self._load(position, end - position)
            except Refusal:
                return
            yield frame, end
            position = end


class Spool:
    """Contributions that no round has used yet, at most one of each peer."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, or make it."""
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._found: dict[str, tuple[int, Contribution]] = {}

    def open_round(self, number: int) -> None:
        """Go on to a round: what there is of others is removed."""
        for _, contribution in self._found.values():
            contribution.discard()
        self._found = {}
        for entry in self._folder.iterdir():
            if entry != self._of_round(number):
                shutil.rmtree(entry)
        self._of_round(number).mkdir(exist_ok=True)
        sync_folder(self._folder)

    def keep(self, is_wanted: Callable[[str, int], bool]) -> None:
        """Remove what a former server has left unless it is wanted, given the peer and the round."""
        for path in list(self._folder.glob("round-*/*.frames")):
            if not is_wanted(path.stem, int(path.parent.name.removeprefix("round-"))):
                path.unlink()
        self._remove_empty()

    def contribution(self, peer: str, number: int, catalog: Catalog, codec: str) -> Contribution:
        """Return the contribution of a peer to a round, perhaps an empty one; one to another round is removed."""
        if peer in self._found and self._found[peer][0] != number:
            self.discard(peer)
        if peer not in self._found:
            folder = self._of_round(number)
            if not folder.exists():
                folder.mkdir()
                sync_folder(self._folder)
            self._found[peer] = number, Contribution(folder / f"{peer}.frames", catalog, codec)
        return self._found[peer][1]

    def discard(self, peer: str) -> None:
        """Remove what a peer has uploaded."""
        if peer in self._found:
            self._found.pop(peer)[1].discard()
        for path in list(self._folder.glob(f"round-*/{peer}.frames")):
            path.unlink()
        self._remove_empty()

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by peer."""
        return {peer: contribution.nbytes for peer, (_, contribution) in self._found.items()}

    def _remove_empty(self) -> None:
        for folder in list(self._folder.iterdir()):
            if not any(folder.iterdir()):
                folder.rmdir()

    def _of_round(self, number: int) -> Path:
        return self._folder / f"round-{number:08d}"


def _key(frame: Frame) -> _Key:
    return frame.box, frame.offset
