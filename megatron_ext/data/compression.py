# SPDX-License-Identifier: Apache-2.0
"""Compressed files: recognized by their first bytes, read as a stream of what they hold."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Buffer, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.data.optional import import_optional

__all__ = [
    "BUFFER_BYTES",
    "DamagedData",
    "Stream",
    "compression_of",
    "compression_of_name",
    "open_file",
    "opened",
    "uncompressed_name",
    "unread_compression",
]

_MAGIC = {
    "gzip": b"\x1f\x8b",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
    "zstd": b"\x28\xb5\x2f\xfd",
}
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
"""What follows `BZh` and the level: a block, or the end of empty data. Three letters alone might begin a text."""

_ZSTD_SKIPPABLE, _ZSTD_SKIPPABLE_END = bytes(range(0x50, 0x60)), b"\x2a\x4d\x18"
"""First byte and what follows it of a frame without data, with which parallel zstd begins a file."""

_COMPRESSION_OF_SUFFIX = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}

_UNREAD_MAGIC = {
    "lz4": (b"\x04\x22\x4d\x18", b"\x02\x21\x4c\x18"),
    "compress": (b"\x1f\x9d",),
    "lzip": (b"LZIP\x01",),
}
_UNREAD_SUFFIX = {".lz4": "lz4", ".br": "brotli", ".z": "compress", ".lz": "lzip", ".lzma": "lzma"}
"""Compressions that are not read. Brotli has no first bytes of its own, and .br is the Breton language's, too."""

BUFFER_BYTES = 1 << 16
"""What is read at once, and how far one can look ahead."""


type Stream = io.BufferedReader[Any]


class DamagedData(Exception):
    """Compressed data that is truncated or corrupt; the text says which, as in `gzip data is truncated`."""


def compression_of(head: bytes) -> str | None:
    """Return how a file with these first bytes (12 or more where available) is compressed, or None."""
    if head[:1] in _ZSTD_SKIPPABLE and head[1:4] == _ZSTD_SKIPPABLE_END:
        return "zstd"
    for name, magic in _MAGIC.items():
        if head.startswith(magic) and (name != "bzip2" or head[4:10] in _BZIP2_BLOCKS):
            return name
    return None


def compression_of_name(name: str) -> str | None:
    """Return the compression that a file's name promises, or None."""
    return next((kind for suffix, kind in _COMPRESSION_OF_SUFFIX.items() if name.lower().endswith(suffix)), None)


def unread_compression(head: bytes, name: str) -> str | None:
    """Return how a file is compressed in a way that is not read, with what tells it, or None.

    Args:
        head: Its first bytes; a name counts only where they are no text.
        name: Its name.
    """
    for kind, magics in _UNREAD_MAGIC.items():
        if head.startswith(magics):
            return f"{kind} data, as its first bytes say"
    suffix = next((suffix for suffix in _UNREAD_SUFFIX if name.lower().endswith(suffix)), None)
    if suffix is None or _is_text(head):
        return None
    return f"{_UNREAD_SUFFIX[suffix]} data, as its name says ({name[-len(suffix) :]})"


def _is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-8 without control characters other than white space."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(character >= " " or character.isspace() for character in text)


def uncompressed_name(name: str) -> str:
    """Return a file's name in lower case, without the suffix that promises a compression."""
    lowered = name.lower()
    return next(
        (lowered.removesuffix(suffix) for suffix in _COMPRESSION_OF_SUFFIX if lowered.endswith(suffix)), lowered
    )


def open_file(path: Path) -> Stream:
    """Open a file as it is on disk, such that one can look ahead.

    Raises:
        OSError: It cannot be opened.
    """
    return io.BufferedReader(io.FileIO(path), BUFFER_BYTES)


@contextmanager
def opened(raw: Stream, compression: str | None, path: str) -> Iterator[Stream]:
    """Open what a file holds.

    Args:
        raw: The file, at its start.
        compression: As `compression_of` says; with None it is `raw` itself.
        path: Name of the file, for the message that a package is missing.

    Yields:
        A stream whose reads raise `DamagedData` where compressed data cannot be read.

    Raises:
        UserError: The compression needs a package that is not installed.
    """
    if compression is None:
        yield raw
        return
    with (
        _decompressor(raw, compression, path) as inner,
        io.BufferedReader(_Checked(inner, compression), BUFFER_BYTES) as stream,
    ):
        yield stream


def _decompressor(raw: Stream, compression: str, path: str) -> Any:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if compression == "bzip2":
        return _Streams(raw, bz2.BZ2Decompressor)
    if compression == "xz":
        return _Streams(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=4)
    arrow: Any = import_optional("pyarrow", f"reading {path}, which is compressed with zstd,")
    return arrow.CompressedInputStream(raw, "zstd")


class _Streams:
    """Compressed streams one after the other, all of them: Python's own files end without a word at a damaged one."""

    def __init__(self, raw: Stream, new: Callable[[], Any], *, padding: int = 0) -> None:
        """Begin.

        Args:
            raw: The file, at its start.
            new: Makes the decompressor of one stream.
            padding: A multiple of this many zero bytes may follow a stream; 0 for none.
        """
        self._raw = raw
        self._new = new
        self._padding = padding
        self._decompressor: Any = None

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *_: object) -> None:
        pass  # the file is the caller's

    def read1(self, most: int) -> bytes:
        """Return at most this many bytes, and none at the end.

        Raises:
            EOFError: The last stream is truncated.
            OSError: Data cannot be read.
            ValueError: The padding cannot be.
            LZMAError: So it is.
        """
        while True:
            if self._decompressor is None:
                self._pass_padding()
                if not self._raw.peek(1):
                    return b""
                self._decompressor = self._new()
            data = b""
            if self._decompressor.needs_input:
                data = self._raw.peek(1)
                if not data:
                    raise EOFError
                self._raw.read(len(data))
            found: bytes = self._decompressor.decompress(data, most)
            if self._decompressor.eof:
                # What comes after the stream is still in the file's buffer: no more than that was read at once.
                self._raw.seek(-len(self._decompressor.unused_data), io.SEEK_CUR)
                self._decompressor = None
            if found:
                return found

    def _pass_padding(self) -> None:
        count = 0
        while self._padding and (ahead := self._raw.peek(1)):
            zeros = len(ahead) - len(ahead.lstrip(b"\0"))
            self._raw.read(zeros)
            count += zeros
            if zeros < len(ahead):
                break
        if self._padding and count % self._padding:
            raise ValueError(f"{count} zero bytes after a stream")


class _Checked(io.RawIOBase):
    """A decompressor with one kind of error, which is raised after all that could be read before it."""

    def __init__(self, inner: Any, compression: str) -> None:
        self._inner = inner
        self._compression = compression
        self._failure: DamagedData | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view):
            try:
                data = self._read(min(len(view) - filled, BUFFER_BYTES))
            except DamagedData as error:
                self._failure = error
                if filled:
                    break
                raise
            if not data:
                break
            view[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def _read(self, most: int) -> bytes:
        if self._failure is not None:
            raise self._failure
        try:
            return bytes(self._inner.read1(most))
        except EOFError as error:
            raise DamagedData(f"{self._compression} data is truncated") from error
        except (OSError, ValueError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's, not the data's
            reason = "truncated" if "runcated" in str(error) else f"corrupt ({error})"
            raise DamagedData(f"{self._compression} data is {reason}") from error
