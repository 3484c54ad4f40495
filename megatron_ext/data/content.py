# SPDX-License-Identifier: Apache-2.0
"""What a file holds, told by its first bytes and lines.

The rule, in this order; a format that the user gives (`--format`) replaces all of it but 1:

1. gzip, bzip2, xz and zstd are recognized by their first bytes, whatever the name, and what they hold is looked at in
   the same way. A name that promises one of them (.gz, .bz2, .xz, .zst) and does not keep it is an error.
2. Parquet and Arrow are recognized by their first bytes; a name that ends in .parquet, .pq, .arrow or .feather is read
   as what it promises.
3. Archives, UTF-16, UTF-32, and what has a zero byte near its start (binary data) are not read.
4. JSON lines: the first line that is not blank, or the one after it, is one whole JSON object.
5. A JSON array of records: `[` and `{` are the first two characters that are not blank.
6. JSON records over several lines: the file begins with an object that has the text's key (`--jsonl-key`).
7. A name that ends in .jsonl, .jsonlines or .ndjson is read as JSON lines.
8. A JSON array of strings is not read: each could be a document, or all of them one.
9. Everything else is text, and so one document: source code, Markdown, also other JSON, such as package.json.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ext.data.compression import (
    DamagedData,
    Stream,
    compression_of,
    compression_of_name,
    open_file,
    opened,
)
from megatron_ext.data.discover import FileFormat, SourceFile
from megatron_ext.data.documents import MAX_DOCUMENT_BYTES

__all__ = ["BINARY_PROBE_BYTES", "TOO_LONG", "Content", "Unread", "content_of"]

BINARY_PROBE_BYTES = 8192
"""A text file with a zero byte among this many first bytes is taken for binary data."""

TOO_LONG = (
    f"too long for one document (limit {MAX_DOCUMENT_BYTES}); "
    "split the file, or write one JSON line per document and read it with --format jsonl"
)
"""The end of a message about a text."""

_RECORD_PROBE_BYTES = 64 << 20
"""A first record over several lines is looked for in so many bytes."""

_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_UTF8_BOM = codecs.BOM_UTF8

_ARCHIVES = {b"PK\x03\x04": "zip", b"PK\x05\x06": "zip", b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar"}
_TAR_OFFSET, _TAR_MAGIC = 257, b"ustar"

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class Content:
    """How to read a file."""

    format: FileFormat
    """What is inside, where it is compressed."""

    compression: str | None
    """gzip, bzip2, xz, zstd, or None."""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A file that is not read."""

    kind: Literal["binary", "archive", "encoding", "compression", "length", "strings", "unreadable"]
    """The group it is counted in."""

    message: str
    """What it is, and what to do."""


def content_of(source: SourceFile, *, json_key: str = "text") -> Content | Unread:
    """Return what a file holds by the rule above, from its first bytes and lines.

    Raises:
        UserError: The file needs a package that is not installed.
    """
    promised = compression_of_name(source.name)
    try:
        with open_file(source.path) as raw:
            compression = compression_of(raw.read(12))
            raw.seek(0)
            if promised not in (None, compression):
                suffix = "." + source.name.rsplit(".", 1)[1]
                return Unread(kind="compression", message=f"not {promised} data although the name ends in {suffix}")
            with opened(raw, compression, str(source.path)) as stream:
                found = _format(stream, source, json_key)
    except DamagedData as error:
        return Unread(kind="compression", message=f"{error}, nothing could be read")
    except OSError as error:
        return Unread(kind="unreadable", message=f"cannot read: {error.strerror or error}")
    is_one_text = found == "text" or (isinstance(found, Unread) and found.kind == "binary")
    if is_one_text and compression is None and source.size > MAX_DOCUMENT_BYTES:
        return Unread(kind="length", message=f"{source.size} bytes are {TOO_LONG}")
    return found if isinstance(found, Unread) else Content(format=found, compression=compression)


def _format(stream: Stream, source: SourceFile, json_key: str) -> FileFormat | Unread:
    head = _peek(stream)
    if source.chosen and source.format in ("parquet", "arrow"):
        return source.format
    if head.startswith(_BYTE_ORDER_MARKS):
        message = "UTF-16 or UTF-32 text, as its first bytes say; convert the file to UTF-8"
        return Unread(kind="encoding", message=message)
    if source.chosen:
        return source.format if source.format != "text" else _unless_binary(head) or "text"
    return _by_content(head, stream, source, json_key)


def _by_content(
    head: bytes, stream: Stream, source: SourceFile, json_key: str
) -> FileFormat | Unread:
    if head.startswith((b"PAR1", b"PARE")):
        return "parquet"
    # A stream begins with this mark and the length of its schema.
    if head.startswith(b"ARROW1") or (head.startswith(b"\xff\xff\xff\xff") and int.from_bytes(head[4:8], "little") > 0):
        return "arrow"
    if source.format in ("parquet", "arrow"):
        return source.format
    binary = _unless_binary(head)
    if binary is not None and source.format != "jsonl":
        return binary
    start = head.removeprefix(_UTF8_BOM).lstrip()
    if start.startswith(b"{"):
        return _objects(stream, json_key) or source.format
    if start.startswith(b"["):
        inner = start[1:].lstrip()
        if inner.startswith(b"{"):
            return "json"
        if source.format == "text" and _is_array_of_strings(inner, len(head) == BINARY_PROBE_BYTES):
            message = "a JSON array of strings; use --format json to take each as a document, or --format text"
            return Unread(kind="strings", message=message)
    return source.format


def _peek(stream: Stream) -> bytes:
    """Return the first bytes of a file without passing over them."""
    return stream.peek(BINARY_PROBE_BYTES)[:BINARY_PROBE_BYTES]


def _unless_binary(head: bytes) -> Unread | None:
    for magic, kind in _ARCHIVES.items():
        if head.startswith(magic):
            return Unread(kind="archive", message=f"a {kind} archive, as its first bytes say; unpack it")
    if head[_TAR_OFFSET:].startswith(_TAR_MAGIC):
        return Unread(kind="archive", message="a tar archive, as its first bytes say; unpack it")
    zero = head.find(b"\0")
    if zero >= 0:
        message = f"binary data (zero byte at offset {zero}), not text; leave the file out"
        return Unread(kind="binary", message=message)
    return None


def _objects(stream: Stream, json_key: str) -> Literal["json", "jsonl"] | None:
    """Tell records from other text that begins with `{`."""
    first = _line(stream)
    if len(first) > MAX_DOCUMENT_BYTES or isinstance(_parsed(first), dict):
        return "jsonl"
    second = _line(stream)
    if second.lstrip().startswith(b"{") and isinstance(_parsed(second), dict):
        return "jsonl"
    text = (first + second + stream.read(_RECORD_PROBE_BYTES)).decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    try:
        value, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return "json" if isinstance(value, dict) and json_key in value else None


def _line(stream: Stream) -> bytes:
    """Return the next line that is not blank."""
    while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
        if line.strip():
            return line
    return b""


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.removeprefix(_UTF8_BOM).decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def _is_array_of_strings(inner: bytes, is_cut: bool) -> bool:
    """Return whether what follows a `[` is a JSON string, and a comma or the array's end."""
    if not inner.startswith(b'"'):
        return False
    text = inner.decode("utf-8", errors="replace")
    try:
        value, end = _DECODER.raw_decode(text)
    except ValueError:
        return is_cut  # a string so long that its end is not in sight
    return isinstance(value, str) and text[end:].lstrip()[:1] in (",", "]")
