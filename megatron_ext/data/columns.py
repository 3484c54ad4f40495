# SPDX-License-Identifier: Apache-2.0
"""Reads a text column of Parquet and Arrow files: one document per row."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.data.compression import DamagedData, open_file, opened
from megatron_ext.data.documents import Document, Item, Problem, Skipped
from megatron_ext.data.optional import import_optional

__all__ = ["NO_TEXT", "read_rows"]

NO_TEXT = "no text (null)"
"""The message of the `Problem` of a row without text."""

_ROWS_AT_ONCE = 1024


def read_rows(
    path: Path, size: int, kind: str, *, compression: str | None, column: str, option: str
) -> Iterator[Item]:
    """Yield the documents of one file in order.

    Args:
        path: The file.
        size: Its bytes.
        kind: `parquet` or `arrow` (Arrow's file format, which is Feather's, too, or its stream format).
        compression: Of the whole file, which is then unpacked into a temporary one: rows are found from its end.
        column: Holds the text.
        option: What the user chooses it by, for messages.

    Raises:
        UserError: pyarrow is not installed.
    """
    name = str(path)
    arrow: Any = import_optional("pyarrow", f"reading {name}")
    opener = _open_parquet if kind == "parquet" else _open_arrow
    number = 0
    try:
        with contextlib.ExitStack() as stack:
            schema, rows, batches = opener(stack, _plain_file(stack, path, compression), column)
            wrong = _wrong_column(arrow, schema, column, option)
            if wrong is not None:
                yield Problem(path=name, position="", message=wrong)
                return
            for batch in batches:
                for value in batch.column(column):
                    # Arrow's streams do not say how many rows follow.
                    share = size * (number + 1) // rows - size * number // rows if rows else 0
                    number += 1
                    yield _row(value, name, f"row {number}", share)
            if number == 0:
                yield Skipped(reason="empty file", path=name)
    except DamagedData as error:
        yield Problem(path=name, position="", message=f"{error}, nothing could be read")
    except (arrow.ArrowException, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"not a readable {kind.capitalize()} file: {first_line}"
        yield Problem(path=name, position=f"row {number + 1}" if number else "", message=message)


def _plain_file(stack: contextlib.ExitStack, path: Path, compression: str | None) -> Any:
    """Return the file, open, as it was before it was compressed."""
    raw = stack.enter_context(open_file(path))
    if compression is None:
        return raw
    with opened(raw, compression, str(path)) as stream:
        copy = tempfile.TemporaryFile()  # noqa: SIM115  # the caller's stack closes it
        stack.callback(copy.close)
        shutil.copyfileobj(stream, copy)
    copy.seek(0)
    return copy


def _open_parquet(stack: contextlib.ExitStack, file: Any, column: str) -> tuple[Any, int, Iterator[Any]]:
    parquet: Any = import_optional("pyarrow.parquet", "reading Parquet")
    opened_file = stack.enter_context(parquet.ParquetFile(file))
    batches = opened_file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column])
    return opened_file.schema_arrow, opened_file.metadata.num_rows, batches


def _open_arrow(stack: contextlib.ExitStack, file: Any, column: str) -> tuple[Any, int, Iterator[Any]]:
    ipc: Any = import_optional("pyarrow.ipc", "reading Arrow")
    is_stream = file.read(6) != b"ARROW1"
    file.seek(0)
    if is_stream:
        reader = stack.enter_context(ipc.open_stream(file))
        return reader.schema, 0, iter(reader)
    reader = stack.enter_context(ipc.open_file(file))
    batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    return reader.schema, sum(reader.get_batch(index).num_rows for index in range(reader.num_record_batches)), batches


def _wrong_column(arrow: Any, schema: Any, column: str, option: str) -> str | None:
    """Return why a column cannot be read, or None."""
    if column not in schema.names:
        return f"no column {column!r}; columns are {', '.join(schema.names)} ({option})"
    if schema.names.count(column) > 1:
        return f"{schema.names.count(column)} columns are named {column!r}; rename one ({option})"
    kind = schema.field(column).type
    if not _is_text(arrow, kind):
        return f"column {column!r} has type {kind}, not string ({option})"
    return None


def _row(value: Any, path: str, position: str, source_bytes: int) -> Item:
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
