# SPDX-License-Identifier: Apache-2.0
"""Reads a file's documents: one per text file, JSON record, row of a table, or end of document among token ids.

What is inside says `content.py`.

Readers never raise for bad input. They yield a `Problem` that names the file and the line and read on where
that makes sense; the caller decides whether a problem ends the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from megatron_ext.data.columns import NO_TEXT, read_rows
from megatron_ext.data.compression import DamagedData, Stream, open_file, opened
from megatron_ext.data.content import BINARY_PROBE_BYTES, TOO_LONG, Content, Unread, content_of, zero_byte
from megatron_ext.data.discover import SourceFile
from megatron_ext.data.documents import MAX_DOCUMENT_BYTES, ONE_TEXT, Document, Item, Problem, Skipped
from megatron_ext.data.json_values import BadJson, json_values
from megatron_ext.data.token_ids import read_token_ids

__all__ = ["BINARY_PROBE_BYTES", "NO_TEXT", "read_documents"]

_UTF8_BOM = b"\xef\xbb\xbf"

_Place = Callable[[], int]
"""Returns how many bytes of the file on disk have been read."""


def read_documents(
    source: SourceFile,
    *,
    parquet_column: str = "text",
    parquet_option: str = "--parquet-column",
    json_key: str = "text",
    token_dtype: str | None = None,
    vocab_size: int | None = None,
    eod: int | None = None,
    content: Content | Unread | None = None,
) -> Iterator[Item]:
    """Yield the documents of one file in order.

    Args:
        source: The file.
        parquet_column: Column that holds the text in Parquet and Arrow files.
        parquet_option: What the user chooses it by, for messages.
        json_key: Key of the text in JSON records.
        token_dtype: Type of token ids on disk; None leaves it to the files.
        vocab_size: Number of ids of the tokenizer, needed for token ids alone.
        eod: The id that ends documents, needed for them, too.
        content: What the file holds, where that is known already.

    Raises:
        UserError: The file needs a package that is not installed.
    """
    path = str(source.path)
    if source.size == 0:
        yield Skipped(reason="empty file", path=path)
        return
    if content is None:
        content = content_of(source)
    if isinstance(content, Unread):
        if content.kind == "binary" and not source.named:
            yield Skipped(reason="binary file", path=path)
        else:
            yield Problem(path=path, position="", message=content.message)
    elif content.format in ("parquet", "arrow"):
        yield from read_rows(
            source.path,
            source.size,
            content.format,
            compression=content.compression,
            column=parquet_column,
            option=parquet_option,
        )
    else:
        yield from _read_stream(source, content, path, json_key, token_dtype, vocab_size, eod)


def _read_stream(
    source: SourceFile,
    content: Content,
    path: str,
    json_key: str,
    token_dtype: str | None,
    vocab_size: int | None,
    eod: int | None,
) -> Iterator[Item]:
    try:
        with (
            open_file(source.path) as raw,
            opened(raw, content.compression, path) as stream,
        ):
            if content.format == "tokens":
                assert vocab_size is not None and eod is not None, "prepare knows the tokenizer"
                yield from read_token_ids(
                    stream, source.path, source.size, dtype=token_dtype, vocab_size=vocab_size, eod=eod
                )
            elif content.format == "text":
                yield from _read_text(stream, path, source.size)
            elif content.format == "json":
                yield from _read_json(stream, raw.tell, path, json_key=json_key, strings=source.chosen)
            else:
                yield from _read_json_lines(stream, raw.tell, path)
    except OSError as error:
        yield Problem(path=path, position="", message=f"cannot read: {error.strerror or error}")


def _read_text(stream: Stream, path: str, size: int) -> Iterator[Item]:
    try:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    except DamagedData as error:
        yield Problem(path=path, position="", message=str(error))
        return
    if len(data) > MAX_DOCUMENT_BYTES:
        yield Problem(path=path, position="", message=f"what was compressed is {TOO_LONG}")
    elif not data:
        yield Skipped(reason="empty file", path=path)
    elif (zero := data.find(b"\0")) >= 0:
        yield Problem(path=path, position="", message=zero_byte(zero))
    else:
        yield Document(path=path, position="", payload=data, is_json=False, source_bytes=size)


def _read_json_lines(stream: Stream, place: _Place, path: str) -> Iterator[Item]:
    """Yield one document per line that is not blank."""
    number = 0
    done = 0
    found = False
    while True:
        try:
            line = stream.readline()
        except DamagedData as error:
            message = f"{error}, nothing could be read after line {number}"
            yield Problem(path=path, position=f"line {number + 1}", message=message)
            return
        if not line:
            break
        number += 1
        # Files that were put together have one at the start of each.
        line = line.removeprefix(_UTF8_BOM)
        if not line.strip():
            continue
        found = True
        position = place()
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


def _read_json(
    stream: Stream, place: _Place, path: str, *, json_key: str, strings: bool
) -> Iterator[Item]:
    """Yield one document per record; with `strings` a string is one, too."""
    number = 0
    done = 0
    try:
        for source, value in json_values(stream):
            number += 1
            position = place()
            # As JSON: only the document's checks know whether what it says is text.
            record = json.dumps({json_key: value}) if strings and isinstance(value, str) else source
            yield Document(
                path=path,
                position=f"record {number}",
                payload=record.encode("utf-8"),
                is_json=True,
                source_bytes=position - done,
            )
            done = position
    except (BadJson, DamagedData) as error:
        message = f"{error}, nothing could be read after record {number}"
        if number == 0 and isinstance(error, BadJson):
            message += f"; {ONE_TEXT}"
        yield Problem(path=path, position=f"record {number + 1}", message=message)
        return
    if number == 0:
        yield Skipped(reason="empty file", path=path)
