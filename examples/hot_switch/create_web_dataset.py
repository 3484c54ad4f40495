# SPDX-License-Identifier: Apache-2.0
"""Write a text column of Parquet files as JSON lines; examples/hot_switch/create_web_dataset.sh starts it."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started by its path, a script knows only its folder

from megatron_ext.data.discover import SourceFile, find_sources
from megatron_ext.data.documents import Document, Problem
from megatron_ext.data.readers import NO_TEXT, read_documents
from megatron_ext.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert, unless it was done already; return 2 for bad input."""
    parser = argparse.ArgumentParser(prog="create_web_dataset", description=__doc__)
    parser.add_argument("parquet", nargs="+", type=Path, help="input files, in this order")
    parser.add_argument("--output", type=Path, required=True, help="the file of JSON lines")
    parser.add_argument("--column", default="content", help="of the text, and its key in the lines (content)")
    options = parser.parse_args(arguments)
    try:
        convert(options.parquet, options.output, options.column)
    except UserError as error:
        print(f"create_web_dataset: error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(files: Sequence[Path], output: Path, column: str) -> None:
    """Write the lines, and beside them what they were made from, which tells when there is nothing to do.

    Args:
        files: Parquet files.
        output: file of JSON lines with one key, `column`.
        column: strings; rows without one are left out.

    Raises:
        UserError: a file is missing, is not Parquet, or has no such column of strings; or the lines cannot be written.
    """
    for path in files:
        if path.is_dir():
            raise UserError(f"{path}: is not a file")
        if path.is_file() and path.stat().st_size == 0:
            raise UserError(f"{path}: has no bytes, which no Parquet file is without; download it again")
    inventory = find_sources(files, file_format="parquet")
    made_from = {
        "column": column,
        "files": [str(source.path.resolve()) for source in inventory.files],
        "digest": inventory.digest(),
    }
    stamp = output.with_name(output.name + ".made_from.json")
    if output.is_file() and _read(stamp) == {**made_from, "output": _identity(output)}:
        print(f"{output}: up to date, nothing done")
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        count = _write(inventory.files, output, column)
        stamp.write_text(json.dumps({**made_from, "output": _identity(output)}) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}; make room, or give another place") from None
    print(f"{output}: {count:,} documents from {len(inventory.files)} files")


def _write(files: Sequence[SourceFile], output: Path, column: str) -> int:
    """Write all lines or none; return how many."""
    partial, count = output.with_name(output.name + ".partial"), 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for source in files:
                for text in _texts(source, column):
                    file.write(json.dumps({column: text}) + "\n")
                    count += 1
        partial.replace(output)
    except BaseException:  # Ctrl-C too: no half file stays
        partial.unlink(missing_ok=True)
        raise
    return count


def _read(stamp: Path) -> Any:
    """Return what a stamp says; None where there is none, or where its writer was interrupted."""
    try:
        return json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _identity(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _texts(source: SourceFile, column: str) -> Iterator[str]:
    for item in read_documents(source, parquet_column=column, parquet_option="COLUMN, or --column"):
        if isinstance(item, Document):
            assert isinstance(item.payload, str), "Parquet has strings"
            yield item.payload
        elif isinstance(item, Problem) and item.message != NO_TEXT:
            raise UserError(str(item))


if __name__ == "__main__":
    sys.exit(main())
