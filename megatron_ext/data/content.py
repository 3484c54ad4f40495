# SPDX-License-Identifier: Apache-2.0
"""What a file holds, told by its first bytes and lines.

The rule, in this order; a format that the user gives (`--format`) replaces all of it but 1:

1. gzip, bzip2, xz and zstd are recognized by their first bytes, whatever the name, and what they hold is looked at in
   the same way. A name that promises one of them (.gz, .bz2, .xz, .zst) and does not keep it is an error. What is
   compressed in another way (lz4, brotli, compress, lzip, lzma) is named, and not read.
2. Parquet and Arrow are recognized by their first bytes; a name that ends in .parquet, .pq, .arrow or .feather is read
   as what it promises.
3. Archives, UTF-16, UTF-32, and what has a zero byte near its start (binary data) are not read. Nor are token ids
   (.npy), unless the user says that they are some (`--format tokens`): mostly there is nothing in them that does.
4. JSON is what has a name that ends in .json, .jsonl, .jsonlines or .ndjson, and what begins with `{"`, `{}` or `[{`,
   white space aside. It is never one text: each record becomes a document, or an error that names it.
5. JSON that begins with `[` is an array of records. One of strings is not read, whatever its name: each could be a
   document, or all of them one.
6. Other JSON is JSON lines where its first line is JSON, or is where the damage lies; else records over several lines.
7. A name that ends in .json and does not keep it, from the first character on, is an error.
8. Tables, and documents whose text lies between what describes it (`_MARKUP`: CSV, HTML, PDF, ...), are known by their
   name or first bytes, and not read: as text they would be one document with all of that. `--format text` says so.
9. Everything else is text, and so one document: source code, Markdown. It has no zero byte anywhere.

Where an object has a key twice, the last one counts, as everywhere in Python's json.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import Literal

from megatron_ext.data.compression import (
    DamagedData,
    Stream,
    compression_of,
    compression_of_name,
    open_file,
    opened,
    uncompressed_name,
    unread_compression,
)
from megatron_ext.data.discover import FileFormat, SourceFile
from megatron_ext.data.documents import MAX_DOCUMENT_BYTES
from megatron_ext.data.json_values import JSON_DECODER

__all__ = ["BINARY_PROBE_BYTES", "NPY_MAGIC", "TOO_LONG", "Content", "Unread", "content_of", "zero_byte"]

BINARY_PROBE_BYTES = 8192
"""A text file with a zero byte among this many first bytes is known to be binary data before any file is read; one with
a zero byte behind them when it is read."""

TOO_LONG = (
    f"too long for one document (limit {MAX_DOCUMENT_BYTES}); "
    "split the file, or write one JSON line per document and read it with --format jsonl"
)
"""The end of a message about a text."""

_RECORD_PROBE_BYTES = 64 << 20
"""A first record over several lines is looked for in this many bytes."""

_FIRST_RECORDS = 1 << 20
"""Characters that are inspected of a first line that holds several records."""

_NO_JSON = (
    "repair its beginning, or use --format text to take each file as one text, or --format jsonl --on-error skip to "
    "read the lines that are JSON"
)
_LONG_RECORD = "write one JSON line per document, or use --format json, or --format text to take each file as one text"

_PACK_AGAIN = "decompress the file, or pack it again with gzip, bzip2, xz or zstd"

NPY_MAGIC = b"\x93NUMPY"
"""How a file begins that numpy has written."""

_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_UTF8_BOM = codecs.BOM_UTF8

_ARCHIVES = {b"PK\x03\x04": "zip", b"PK\x05\x06": "zip", b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar"}
_TAR_OFFSET, _TAR_MAGIC = 257, b"ustar"

_MARKUP = {
    "a table of comma-separated values (CSV)": ((".csv",), ()),
    "a table of tab-separated values (TSV)": ((".tsv", ".tab"), ()),
    "HTML": ((".html", ".htm", ".xhtml", ".mhtml"), (b"<!doctype html", b"<html")),
    "SVG": ((".svg",), (b"<svg",)),
    "XML": ((".xml", ".rss", ".atom"), (b"<?xml",)),
    "RTF": ((".rtf",), (b"{\\rtf",)),
    "PDF": ((".pdf",), (b"%pdf-",)),
    "PostScript": ((".ps", ".eps"), (b"%!ps",)),
    "a web archive (WARC)": ((".warc", ".wet", ".wat"), (b"warc/",)),
}
"""What is not one text although it has letters: ends of names, and beginnings, in small letters."""

_SPACE = re.compile(r"[ \t\r\n]*")


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

    kind: Literal[
        "binary",
        "ids",
        "archive",
        "encoding",
        "compression",
        "packed",
        "length",
        "strings",
        "markup",
        "json",
        "record",
        "twice",
        "unreadable",
    ]
    """The group it is counted in."""

    message: str
    """What it is, and what to do."""


def content_of(source: SourceFile) -> Content | Unread:
    """Return the kind of a file by the rule above, from its first bytes and lines.

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
            unread = unread_compression(_peek(raw), source.name) if compression is None else None
            if unread is not None:
                return Unread(kind="packed", message=f"{unread}, which is not read; {_PACK_AGAIN}")
            with opened(raw, compression, str(source.path)) as stream:
                found = _format(stream, source, compression)
    except DamagedData as error:
        return Unread(kind="compression", message=f"{error}, nothing could be read")
    except OSError as error:
        return Unread(kind="unreadable", message=f"cannot read: {error.strerror or error}")
    is_one_text = found == "text" or (isinstance(found, Unread) and found.kind == "binary")
    if is_one_text and compression is None and source.size > MAX_DOCUMENT_BYTES:
        return Unread(kind="length", message=f"{source.size} bytes are {TOO_LONG}")
    return found if isinstance(found, Unread) else Content(format=found, compression=compression)


def _format(stream: Stream, source: SourceFile, compression: str | None) -> FileFormat | Unread:
    head = _peek(stream)
    inner = compression_of(head) if compression is not None else None
    if inner is not None:
        message = f"compressed twice, with {inner} and then with {compression}; unpack it once"
        return Unread(kind="twice", message=message)
    if source.chosen and source.format in ("parquet", "arrow", "tokens"):
        return source.format
    if head.startswith(_BYTE_ORDER_MARKS):
        message = "UTF-16 or UTF-32 text, as its first bytes say; convert the file to UTF-8"
        return Unread(kind="encoding", message=message)
    if source.chosen:
        return source.format if source.format != "text" else _unless_binary(head) or "text"
    return _by_content(head, stream, source)


def _by_content(head: bytes, stream: Stream, source: SourceFile) -> FileFormat | Unread:
    if head.startswith((b"PAR1", b"PARE")):
        return "parquet"
    # A stream begins with this mark and the length of its schema.
    if head.startswith(b"ARROW1") or (head.startswith(b"\xff\xff\xff\xff") and int.from_bytes(head[4:8], "little") > 0):
        return "arrow"
    if source.format in ("parquet", "arrow"):
        return source.format
    if head.startswith(NPY_MAGIC) or uncompressed_name(source.name).endswith(".npy"):
        return Unread(kind="ids", message="token ids or other numbers (.npy); --format tokens reads ids")
    found: FileFormat | Unread | None = _unless_binary(head) if source.format != "jsonl" else None
    found = found or _json(stream, source.format)
    is_text = found == "text" or (isinstance(found, Unread) and found.kind == "binary")
    markup = _markup(head, uncompressed_name(source.name)) if is_text and source.format == "text" else None
    return markup or found


def _json(stream: Stream, promised: FileFormat) -> FileFormat | Unread:
    """Tell in which form a file holds JSON; `text` where neither its beginning nor its name promises any."""
    if _peek(stream).startswith(_UTF8_BOM):
        stream.read(len(_UTF8_BOM))
    first = _next(stream)
    if first == b"[":
        stream.read(1)
        return _array(stream, promised)
    if first == b"{" or (first and promised == "json"):
        return _values(stream, promised)
    return promised


def _next(stream: Stream) -> bytes:
    """Pass over white space, however much, and return the byte after it, which is still to be read; none at the end."""
    while ahead := stream.peek(1):
        rest = ahead.lstrip()
        stream.read(len(ahead) - len(rest))
        if rest:
            return rest[:1]
    return b""


def _array(stream: Stream, promised: FileFormat) -> FileFormat | Unread:
    """Return the kind of a file after its first `[`."""
    if _next(stream) == b"{":
        return "json"
    start = stream.read(BINARY_PROBE_BYTES)
    if promised != "jsonl" and _is_array_of_strings(start, len(start) == BINARY_PROBE_BYTES):
        message = "a JSON array of strings; use --format json to take each as a document, or --format text"
        return Unread(kind="strings", message=message)
    return promised


def _values(stream: Stream, promised: FileFormat) -> FileFormat | Unread:
    """Return the kind of a file that begins with a `{`, or is named as JSON and does not begin with a `[`."""
    data = stream.readline(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        return "jsonl"
    line = data.decode("utf-8", errors="replace")
    try:
        JSON_DECODER.decode(line)
    except json.JSONDecodeError:
        pass
    except RecursionError:
        return "jsonl"  # too deep: that line's fault alone
    else:
        return "jsonl"
    more = stream.read(_RECORD_PROBE_BYTES)
    rest = more.decode("utf-8", errors="replace")
    text = line + rest
    if promised == "text" and text[1:].lstrip()[:1] != '"':
        return "text"
    try:
        end = 0
        while end < min(len(line.rstrip()), _FIRST_RECORDS):
            _, end = JSON_DECODER.raw_decode(text, _SPACE.match(text, end).end())  # type: ignore[union-attr]  # matches all
    except json.JSONDecodeError as error:
        if error.pos == 0 and promised == "json":
            message = f"not JSON although its name promises that: it begins with {text[0]!a}; {_NO_JSON}"
            return Unread(kind="json", message=message)
        if error.pos < len(line) or rest.lstrip().startswith("{") or promised == "jsonl":
            return "jsonl"
        is_cut = error.msg.startswith("Unterminated") or error.pos == len(text)
        if is_cut and len(more) == _RECORD_PROBE_BYTES:
            return Unread(kind="record", message=f"its first record has no end in {len(more)} bytes; {_LONG_RECORD}")
    except RecursionError:
        pass  # for the reader to tell
    return "json"


def _peek(stream: Stream) -> bytes:
    """Return the first bytes of a file without passing over them."""
    return stream.peek(BINARY_PROBE_BYTES)[:BINARY_PROBE_BYTES]


def zero_byte(offset: int) -> str:
    """Return the message about a text that is none."""
    return f"binary data (zero byte at offset {offset}), not text; leave the file out"


def _unless_binary(head: bytes) -> Unread | None:
    for magic, kind in _ARCHIVES.items():
        if head.startswith(magic):
            return Unread(kind="archive", message=f"a {kind} archive, as its first bytes say; unpack it")
    if head[_TAR_OFFSET:].startswith(_TAR_MAGIC):
        return Unread(kind="archive", message="a tar archive, as its first bytes say; unpack it")
    zero = head.find(b"\0")
    if zero >= 0:
        return Unread(kind="binary", message=zero_byte(zero))
    return None


def _markup(head: bytes, name: str) -> Unread | None:
    """Return why what looks like a text is not one document, or None."""
    start = head.removeprefix(_UTF8_BOM).lstrip()[:32].lower()
    for kind, (suffixes, beginnings) in _MARKUP.items():
        if name.endswith(suffixes) or start.startswith(beginnings):
            known_by = "first bytes say" if start.startswith(beginnings) else "name says"
            advice = "extract its text to JSON lines or Parquet, or use --format text to take each file as one text"
            return Unread(kind="markup", message=f"{kind}, as its {known_by}, which is not read; {advice}")
    return None


def _is_array_of_strings(inner: bytes, is_cut: bool) -> bool:
    """Return whether what follows a `[` begins with a JSON string and a comma or the array's end."""
    if not inner.startswith(b'"'):
        return False
    text = inner.decode("utf-8", errors="replace")
    try:
        value, end = JSON_DECODER.raw_decode(text)
    except ValueError:
        return is_cut  # a string so long that its end is not in sight
    return isinstance(value, str) and text[end:].lstrip()[:1] in (",", "]")
