# SPDX-License-Identifier: Apache-2.0
"""A contribution: what one peer has uploaded for one round, in a file.

Frames lie one after the other as they come: two lengths and the file's salt, the frame without its payload, the
payload. Their checksums are checked when they arrive, when a restarted server finds them, and when they are read to be
reduced.

Files are written over those of former rounds. The salt, a random number in the file's name, tells what is new in it.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_ext.params import flat_offset
from megatron_ext.sync_service.disk.spares import SpareFiles
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import MAX_PAYLOAD, Box, Frame, whole_box
from megatron_ext.sync_service.protocol.limits import Limits
from megatron_ext.sync_service.protocol.names import path_component
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.values.blocks import Block
from megatron_ext.sync_service.values.coverage import Coverage

__all__ = ["Contribution", "Discarded", "new_name", "peer_of"]

_LENGTHS = struct.Struct("<IIQ")
_SALT_BYTES = 8
_MAX_HEAD = 1 << 20


@dataclass(frozen=True, slots=True)
class _Record:
    """Where a frame is in the file."""

    start: int
    """Position of its lengths."""

    head: int
    """Bytes of the frame without its payload."""

    payload: int
    """Bytes of the payload."""

    checksum: int = 0
    """The frame's."""

    @property
    def end(self) -> int:
        """Position of what follows."""
        return self.start + _LENGTHS.size + self.head + self.payload


_Placed = tuple[int, int, _Record]
"""(first element of the tensor in row-major order, count, where the frame is in the file)."""


class Discarded(Exception):
    """The contribution is no longer wanted: its round was closed, or another process has taken its peer's place."""


class Contribution:
    """What one peer has uploaded for one round. May be appended to from several threads.

    Attributes:
        identity: of what is in it, 16 bytes: no other contribution's, nor that of this one after a restart.
    """

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        codec: str,
        spares: SpareFiles | None = None,
        *,
        is_new: bool = False,
        reads_later: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """Open the file, or create it, and find the frames that are in it; a last one that is cut off is dropped.

        Args:
            path: of the file; before its last suffix may be the salt.
            catalog: the tensors.
            codec: of the frames.
            spares: where the file goes when it is over.
            is_new: whether nothing can be in it.
            reads_later: find the frames, which may take long, when the contribution is first appended to or asked what
                it lacks; until then it has no bytes and no tensor that is whole.
            limits: of frames and boxes; none unless given.
        """
        self._catalog = catalog
        self._codec = codec
        self._lock = threading.Lock()  # of everything but the next two
        self._reading = threading.Lock()
        self._readers = 0
        self._index: dict[str, dict[Box, dict[int, _Record]]] = {}
        self._coverage: dict[str, Coverage] = {}
        self._ranges: dict[str, list[_Placed] | None] = {}
        self._discarded = False
        self._is_unwanted = False
        self._is_unread = not is_new
        self._limits = limits
        self._most_frames = None if limits is None else limits.frames_of(catalog)
        self.identity = os.urandom(16)
        self._path = path
        self._salt = _salt_of(path)
        self._spares = spares
        path.touch()
        self._file = path.open("r+b", buffering=0)
        self._size = self._count = 0
        if not reads_later:
            self._read_index()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self._size

    @property
    def frames(self) -> int:
        """Frames in the file."""
        with self._lock:
            self._read_index()
            return self._count

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
        head = frame.head()
        with self._lock:
            self._read_index()
            if self._discarded or self._is_unwanted:
                raise Discarded
            known = self._index.get(frame.name, {}).get(frame.box, {}).get(frame.offset)
            if known is not None and known.checksum == frame.checksum:
                return False
            if known is not None:
                raise Refusal("invalid", f"a frame differs from the one that has arrived before ({frame.place})")
            coverage = self._coverage.setdefault(frame.name, Coverage())
            coverage.check(frame)
            self._check_limits(frame, coverage)
            record = _Record(self._size, len(head), len(frame.payload))
            try:
                lengths = _LENGTHS.pack(record.head, record.payload, self._salt)
                written = os.pwritev(self._file.fileno(), [lengths, head, frame.payload], self._size)
                if written != record.end - record.start:
                    raise OSError(errno.ENOSPC, "the disk is full", str(self._path))
            except OSError:
                self._file.truncate(self._size)
                raise
            self._take(frame, record)
        return True

    def missing(self, index: int | None) -> str | None:
        """Return in words what has not arrived of what a peer has to upload, None when all has.

        Args:
            index: of the peer; None for one that has to upload everything.
        """
        with self._lock:
            self._read_index()
        for spec in self._catalog:
            covered = self._covered(spec)
            is_wanted = index is None or spec.is_trained_by(index)
            if is_wanted and covered != spec.numel:
                return f"{covered} of the {spec.numel} elements of tensor {spec.name!r} have arrived"
            if not is_wanted and covered:
                return f"tensor {spec.name!r} is not this peer's to train"
        return None

    def is_whole(self, spec: TensorSpec) -> bool:
        """Return whether all of a tensor has arrived."""
        return self._covered(spec) == spec.numel

    def _covered(self, spec: TensorSpec) -> int:
        return self._coverage[spec.name].covered if spec.name in self._coverage else 0

    def read(self, spec: TensorSpec, at: Block | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return what was uploaded of a tensor, decoded: fp32, 1-D.

        Args:
            spec: the tensor.
            at: a block of it that begins and ends where frames do, see `ranges`; the whole tensor when None.
            out: memory for it, fp32, 1-D on the CPU, no shorter; memory of its own when None.

        Raises:
            Refusal: the file is damaged.
            Discarded: the contribution is no longer wanted.
        """
        with self._handle() as handle:
            if at is None or at == (0, spec.numel):
                return self._read(handle, spec, out)
            return self._read_block(handle, spec, at, out)

    def ranges(self, spec: TensorSpec) -> list[Block] | None:
        """Return which elements of a tensor its frames hold, in order; None where one does not hold a range."""
        placed = self._placed(spec)
        return None if placed is None else [(first, count) for first, count, _ in placed]

    def _placed(self, spec: TensorSpec) -> list[_Placed] | None:
        """Return (first element, count, record) of a tensor's frames, in order; None where one holds no range."""
        if spec.name not in self._ranges:
            self._ranges[spec.name] = self._find_placed(spec)
        return self._ranges[spec.name]

    def _find_placed(self, spec: TensorSpec) -> list[_Placed] | None:
        found: list[_Placed] = []
        for box, entries in self._index.get(spec.name, {}).items():
            first = flat_offset(spec.shape, box.start, box.shape)
            if first is None:
                return None
            ordered = sorted(entries.items())
            ends = [*(offset for offset, _ in ordered[1:]), box.numel]
            found += [(first + at, end - at, record) for (at, record), end in zip(ordered, ends, strict=True)]
        return sorted(found, key=lambda entry: entry[0])

    def _read_block(self, handle: int, spec: TensorSpec, at: Block, out: torch.Tensor | None) -> torch.Tensor:
        begin, count = at
        out = torch.empty(count, dtype=torch.float32) if out is None else out[:count]
        placed = self._placed(spec)
        assert placed is not None
        place, end = bisect_left(placed, begin, key=lambda entry: entry[0]), begin + count
        while place < len(placed) and placed[place][0] < end:
            first, size, record = placed[place]
            values = out[first - begin : first - begin + size]
            if self._codec == "fp32" and record.payload:
                frame = self._load(handle, record, values)
            else:
                frame = self._load(handle, record)
                frame.decode_into(values)
            found = flat_offset(spec.shape, frame.box.start, frame.box.shape)
            if frame.name != spec.name or found is None or (found + frame.offset, frame.count) != (first, size):
                raise Refusal("damaged", f"another frame is where {spec.name!r} should be ({frame.place})")
            place += 1
        return out

    def _read(self, handle: int, spec: TensorSpec, out: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(spec.numel, dtype=torch.float32) if out is None else out[: spec.numel]
        total = out.view(spec.shape)
        for box, entries in self._index.get(spec.name, {}).items():
            is_whole = box == whole_box(spec.shape)
            values = total.view(-1) if is_whole else torch.empty(box.numel, dtype=torch.float32)
            for offset, record in entries.items():
                if self._codec == "fp32" and record.payload:
                    # From the disk to where it belongs.
                    frame = self._load(handle, record, values[offset : offset + record.payload // 4])
                else:
                    frame = self._load(handle, record)
                if (frame.name, frame.box, frame.offset) != (spec.name, box, offset):
                    raise Refusal("damaged", f"another frame is where {spec.name!r} should be ({frame.place})")
                if self._codec != "fp32" or not record.payload:
                    frame.decode_into(values[offset : offset + frame.count])
            if not is_whole:
                total[box.slices] = values.view(box.shape)
        return total.view(-1)

    def frames_of(self, name: str, box: Box) -> Iterator[Frame] | None:
        """Return the frames of a box of a tensor that is whole, in order; None when it came in other boxes.

        They are unchecked: that is done where they arrive. Iterating raises `Discarded` when the contribution is not
        wanted any more.
        """
        found = self._index.get(name, {}).get(box)
        if found is None:
            return None

        def frames() -> Iterator[Frame]:
            with self._handle() as handle:
                for _, record in sorted(found.items()):
                    start = record.start + _LENGTHS.size
                    head = pb2.Frame.FromString(os.pread(handle, record.head, start))
                    yield Frame.from_message(head, os.pread(handle, record.payload, start + record.head))

        return frames()

    def discard(self) -> None:
        """Refuse further frames, and remove the file."""
        self._is_unwanted = True  # no caller waits until everything that a former server left is found
        with self._lock, self._reading:
            self._discarded = True
            # The start in fp32 is far longer than what a lossy codec makes of the rounds after it.
            is_long = os.fstat(self._file.fileno()).st_size > 2 * self._size
            if not self._readers:
                self._file.close()
            if self._readers or self._spares is None or is_long:
                self._path.unlink(missing_ok=True)
            else:
                self._spares.keep(self._path)

    @contextmanager
    def _handle(self) -> Iterator[int]:
        """Yield a handle of the file that is there until the end, should the contribution be discarded meanwhile."""
        with self._reading:
            if self._discarded:
                raise Discarded
            self._readers += 1
        try:
            yield self._file.fileno()
        finally:
            with self._reading:
                self._readers -= 1
                if self._discarded and not self._readers:
                    self._file.close()

    def _read_index(self) -> None:
        """Find the frames that are in the file, unless that has been done; with the lock held, or by one thread."""
        if not self._is_unread or self._is_unwanted:
            return
        self._index, self._coverage, self._size, self._count = {}, {}, 0, 0
        for frame, record in self._records():
            if self._is_unwanted:
                return
            self._take(frame, record)
        self._file.truncate(self._size)
        self._is_unread = False

    def _check_limits(self, frame: Frame, coverage: Coverage) -> None:
        """Check that there may be one more frame.

        Raises:
            Refusal: there may not.
        """
        if self._limits is None or self._most_frames is None:
            return
        if self._count >= self._most_frames:
            raise Refusal(
                "invalid",
                f"the contribution has {self._count} frames already, as many as max_frames of the run allows; upload "
                "larger ones (frame_bytes), or raise max_frames at the server",
            )
        most = self._limits.max_boxes
        if coverage.boxes >= most and not coverage.has(frame.box):
            raise Refusal(
                "invalid",
                f"tensor {frame.name!r} comes in more than {most} boxes, which max_boxes of the run allows; upload it "
                "in larger ones, or raise max_boxes at the server",
            )

    def _take(self, frame: Frame, record: _Record) -> None:
        boxes = self._index.setdefault(frame.name, {})
        boxes.setdefault(frame.box, {})[frame.offset] = replace(record, checksum=frame.checksum)
        self._coverage.setdefault(frame.name, Coverage()).add(frame)
        self._ranges.pop(frame.name, None)
        self._size = record.end
        self._count += 1

    def _load(self, handle: int, record: _Record, out: torch.Tensor | None = None) -> Frame:
        """Return a frame, checked, with its payload in `out` (fp32, 1-D), if that is given."""
        head = bytearray(record.head)
        payload = memoryview(bytearray(record.payload)) if out is None else memoryview(out.numpy()).cast("B")
        read = os.preadv(handle, [head, payload], record.start + _LENGTHS.size)
        if read != record.head + record.payload:
            raise Refusal("damaged", "the file ends in the middle of a frame")
        return Frame.from_bytes(bytes(head), payload)

    def _records(self) -> Iterator[tuple[Frame, _Record]]:
        """Yield the frames in the file, up to the first that is not whole."""
        position, size = 0, self._path.stat().st_size
        while position + _LENGTHS.size <= size:
            head, payload, salt = _LENGTHS.unpack(os.pread(self._file.fileno(), _LENGTHS.size, position))
            record = _Record(position, head, payload)
            if salt != self._salt or record.head > _MAX_HEAD or record.payload > MAX_PAYLOAD or record.end > size:
                return
            try:
                frame = self._load(self._file.fileno(), record)
            except Refusal:
                return
            yield frame, record
            position = record.end


def new_name(peer: str) -> str:
    """Return a name for the file of a peer, PEER.SALT.frames, that no file had before.

    Raises:
        Refusal: the peer's name would lead elsewhere.
    """
    return f"{path_component(peer, 'peer')}.{int.from_bytes(os.urandom(_SALT_BYTES)):0{2 * _SALT_BYTES}x}.frames"


def peer_of(path: Path) -> str:
    """Return whose a file in the folder of a round is: PEER.SALT.frames or PEER.sealed."""
    return path.stem.rpartition(".")[0] if path.suffix == ".frames" else path.stem


def _salt_of(path: Path) -> int:
    """Return the salt of a contribution's file; 0 for one without, which no other was before."""
    text = path.stem.rpartition(".")[2]
    return int(text, 16) if re.fullmatch(rf"[0-9a-f]{{{2 * _SALT_BYTES}}}", text) else 0
