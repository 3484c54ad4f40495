# SPDX-License-Identifier: Apache-2.0
"""Write a text column of Parquet files as JSON lines; examples/hot_switch/create_web_dataset.sh starts it."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started by its path, a script knows only its folder

from megatron_ext.data.optional import import_optional
from megatron_ext.errors import UserError


def main() -> int:
    """Convert, unless it was done already; return 2 for bad input."""
    parser = argparse.ArgumentParser(prog="create_web_dataset", description=__doc__)
    parser.add_argument("parquet", nargs="+", type=Path, help="input files, in this order")
    parser.add_argument("--output", type=Path, required=True, help="the file of JSON lines")
    parser.add_argument("--column", default="content", help="of the text, and its key in the lines (content)")
    options = parser.parse_args()
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
        UserError: a file is missing or is no Parquet, or has no such column of strings.
    """
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: {'is no file' if path.exists() else 'there is no such file'}")
    made_from = {"column": column, "files": [_identity(path) for path in files]}
    stamp = output.with_name(output.name + ".made_from.json")
    if output.is_file() and _read(stamp) == {**made_from, "output": _identity(output)}:
        print(f"{output}: up to date, nothing done")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    partial, count = output.with_name(output.name + ".partial"), 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for path in files:
                for text in _texts(path, column):
                    file.write(json.dumps({column: text}) + "\n")
                    count += 1
    except BaseException:  # Ctrl-C too: no half file stays
        partial.unlink()
        raise
    partial.replace(output)
    stamp.write_text(json.dumps({**made_from, "output": _identity(output)}) + "\n", encoding="utf-8")
    print(f"{output}: {count:,} documents from {len(files)} files")


def _read(stamp: Path) -> Any:
    """Return what a stamp says; None where there is none, or where its writer was interrupted."""
    try:
        return json.loads(stamp.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _identity(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _texts(path: Path, column: str) -> Iterator[str]:
    parquet: Any = import_optional("pyarrow.parquet", f"reading {path}")
    arrow: Any = import_optional("pyarrow", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise UserError(f"{path}: has no column {column!r}; --column takes one of {', '.join(names)}")
            kind = file.schema_arrow.field(column).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise UserError(f"{path}: column {column!r} has type {kind}, not string; give another --column")
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except arrow.ArrowException as error:
        raise UserError(f"{path}: is no readable Parquet file ({error})") from None


if __name__ == "__main__":
    sys.exit(main())
