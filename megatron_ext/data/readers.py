# SPDX-License-Identifier: Apache-2.0
"""Reads a file's documents: one per text file, one per JSON line, one per Parquet row.

Readers never raise for bad input. They yield a `Problem` that names the file and the line and go on where
that makes sense; the caller decides whether a problem ends the run.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from typing import IO, Any

from megatron_ext.data.discover import SourceFile
from megatron_ext.data.documents import MAX_DOCUMENT_BYTES, Document, Item, Problem, Skipped
from megatron_ext.data.optional import import_optional

__all__ = ["BINARY_PROBE_BYTES", "NO_TEXT", "read_documents"]

BINARY_PROBE_BYTES = 8192
"""A text file with a zero byte among this many first bytes is taken for binary data."""

NO_TEXT = "no text (null)"
"""The message of the `Problem` of a Parquet row without text."""

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"


def read_documents(
    source: SourceFile, *, parquet_column: str = "text", parquet_option: str = "--parquet-column"
) -> Iterator[Item]:
    """Yield the documents of one file in order.

    Args:
        source: The file and how to read it.
        parquet_column: Column that holds the text in Parquet files.
        parquet_option: What the user chooses it by, for messages.

    Raises:
        UserError: The file needs a package that is not installed.
    """
    path = str(source.path)
    if source.size == 0:
        yield Skipped(reason="empty file", path=path)
        return
    try:
        if source.format == "text":
            yield from _read_text(source, path)
        elif source.format == "jsonl":
            yield from _read_json_lines(source, path)
        else:
            yield from _read_parquet(source, path, parquet_column, parquet_option)
    except OSError as error:
        yield Problem(path=path, position="", message=f"cannot read: {error.strerror or error}")


def _read_text(source: SourceFile, path: str) -> Iterator[Item]:
    if source.size > MAX_DOCUMENT_BYTES:
        yield Problem(
            path=path,
            position="",
            message=f"{source.size} bytes are too long for one document (limit {MAX_DOCUMENT_BYTES}); "
            "split the file, or write one JSON line per document and read it with --format jsonl",
        )
        return
    with open(source.path, "rb") as file:
        data = file.read()
    zero = data.find(b"\0", 0, BINARY_PROBE_BYTES)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        message = "UTF-16 or UTF-32 text, as its first bytes say; convert the file to UTF-8"
        yield Problem(path=path, position="", message=message)
    elif zero >= 0:
        if source.named:
            message = f"binary data (zero byte at offset {zero}), not text; leave the file out"
            yield Problem(path=path, position="", message=message)
        else:
            yield Skipped(reason="binary file", path=path)
    elif not data:
        yield Skipped(reason="empty file", path=path)
    else:
        yield Document(path=path, position="", payload=data, is_json=False, source_bytes=source.size)


def _read_json_lines(source: SourceFile, path: str) -> Iterator[Item]:
    with open(source.path, "rb") as raw:
        magic = raw.read(len(_GZIP_MAGIC))
        raw.seek(0)
        if magic == _GZIP_MAGIC:
            with gzip.GzipFile(fileobj=raw) as lines:
                yield from _json_lines(lines, raw, path)
        elif source.path.name.lower().endswith(".gz"):
            yield Problem(path=path, position="", message="not gzip data although the name ends in .gz")
        else:
            yield from _json_lines(raw, raw, path)


def _json_lines(lines: IO[bytes] | gzip.GzipFile, raw: IO[bytes], path: str) -> Iterator[Item]:
    """Yield one document per line that is not blank.

    Args:
        lines: The decompressed stream.
        raw: The file underneath, whose position tells how much of the file is done.
        path: Name of the file for messages.
    """
    number = 0
    done = 0
    found = False
    iterator = iter(lines)
    while True:
        try:
            line = next(iterator, None)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            reason = "truncated" if isinstance(error, EOFError) else f"corrupt ({error})"
            message = f"gzip data is {reason}, nothing could be read after line {number}"
            yield Problem(path=path, position=f"line {number + 1}", message=message)
            return
        if line is None:
            break
        number += 1
        if number == 1:
            line = line.removeprefix(_UTF8_BOM)
        if not line.strip():
            continue
        found = True
        position = raw.tell()
        yield Document(
            path=path,
            position=f"line {number}",
            payload=line.rstrip(b"\r\n"),
            is_json=True,
            source_bytes=position - done,
        )
        done = position
    if not found:
        yield Skipped(reason="empty file", path=path)


def _read_parquet(source: SourceFile, path: str, column: str, option: str) -> Iterator[Item]:
    arrow: Any = import_optional("pyarrow", f"reading {path}")
    parquet: Any = import_optional("pyarrow.parquet", f"reading {path}")
    number = 0
    try:
        with parquet.ParquetFile(source.path) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                message = f"no column {column!r}; columns are {', '.join(schema.names)} ({option})"
                yield Problem(path=path, position="", message=message)
                return
            if schema.names.count(column) > 1:
                message = f"{schema.names.count(column)} columns are named {column!r}; rename one ({option})"
                yield Problem(path=path, position="", message=message)
                return
            if not _is_text(arrow, schema.field(column).type):
                kind = schema.field(column).type
                message = f"column {column!r} has type {kind}, not string ({option})"
                yield Problem(path=path, position="", message=message)
                return
            rows = file.metadata.num_rows
            if rows == 0:
                yield Skipped(reason="empty file", path=path)
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for value in batch.column(0):
                    share = source.size * (number + 1) // rows - source.size * number // rows
                    number += 1
                    yield _parquet_row(value, path, f"row {number}", share)
    except (arrow.ArrowException, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"not a readable Parquet file: {first_line}"
        yield Problem(path=path, position=f"row {number + 1}" if number else "", message=message)


def _parquet_row(value: Any, path: str, position: str, source_bytes: int) -> Item:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return Problem(path=path, position=position, message=f"not valid UTF-8 at byte {error.start}")
    if text is None:
        return Problem(path=path, position=position, message=NO_TEXT)
    return Document(path=path, position=position, payload=text, is_json=False, source_bytes=source_bytes)


def _is_text(arrow: Any, kind: Any) -> bool:
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind))
