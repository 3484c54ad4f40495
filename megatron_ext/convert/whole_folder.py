# SPDX-License-Identifier: Apache-2.0
"""Folders that appear under their name only when they are whole, and replace nothing that a conversion did not write.

A folder that is being written, or was, has a record in it: of what it is to become, and, when it is whole, of the files
that were written. What has no record, or more files than its record says, is somebody's, and stays.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.data.progress import megabytes
from megatron_ext.errors import UserError

__all__ = ["RECORD", "identity", "resumed_folder", "system_errors"]

RECORD = "conversion.json"
"""The record's name, in the folder."""

_UNFINISHED = f"{RECORD}.partial"
_WRITER = "megatron-ext convert"


@contextmanager
def resumed_folder(
    target: Path, task: Mapping[str, Any], *, inputs: Mapping[str, Path | None], overwrite: bool
) -> Iterator[Path]:
    """Give a folder to write into, which becomes `target` when the block ends without an error.

    What an earlier run of the same task wrote that was cut off is in it. At no time is `target` there in part.

    Args:
        target: the folder to be.
        task: what tells that the task is the same.
        inputs: what is read, by what the user calls it; None for what was not given.
        overwrite: whether what an earlier conversion wrote there is replaced, in the end.

    Raises:
        UserError: `target` is one of the inputs, or has one in it; it is there, and not empty, and `overwrite` is not
            given; no conversion wrote what is there, or beside it under the names that are needed; or it cannot be
            written.
    """
    place = target.resolve()
    partial, former = (place.parent / f"{place.name}.{state}" for state in ("partial", "former"))
    for folder in (place, partial, former):
        _refuse_input(folder, inputs)
    said = hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()
    try:
        if former.exists() and not place.exists() and _foreign(former) is None:
            former.rename(place)  # a kill between the two renames below
        _refuse_foreign(place, overwrite)
        for folder in (partial, former):
            _refuse_foreign(folder, overwrite=True)
        _remove(former)
        if _record(partial).get("task") != said:
            _remove(partial)
            partial.mkdir(parents=True)
            _write_record(partial, {"task": said})
        yield partial
        _write_record(partial, {"task": said, "files": _files(partial)})
        _refuse_foreign(place, overwrite)  # the conversion may have taken hours
        if place.exists():
            place.rename(former)
        partial.rename(place)
        _remove(former)
    except OSError as error:
        raise UserError(f"{target}: {_reason(error)}{_kept(partial)}") from error


@contextmanager
def system_errors(hiding: type[Exception]) -> Iterator[None]:
    """Raise the system's error in place of the one that a library's writer hides it in.

    Args:
        hiding: what the library raises: RuntimeError in torch, SafetensorError in safetensors.

    Raises:
        OSError: of the system, such as that of a full disk.
    """
    try:
        yield
    except hiding as error:
        found = _hidden(error)
        if found is None:
            raise
        raise found from error


def _hidden(error: BaseException) -> OSError | None:
    """The system's error behind another: one that was raised before it, or one of which its text has the number."""
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, OSError):
            return before
        before = before.__cause__ or before.__context__
    number = re.search(r"\(os error (\d+)\)", str(error))
    return None if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def _reason(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    said = error.strerror or str(error)
    where = "" if error.filename is None else f": {error.filename}"
    return f"{'the disk is full' if full else 'cannot be written'} ({said}{where})"


def _kept(partial: Path) -> str:
    """What an error says of the folder that was being written."""
    if not _record(partial):
        return ""
    size = sum((partial / name).lstat().st_size for name in _files(partial))
    return (
        f"; {partial} is kept, with {megabytes(size)}: the same command continues after the files in it that are whole"
    )


def identity(files: Iterable[Path]) -> list[list[object]]:
    """Return that by which a source that was changed meanwhile is known."""
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _refuse_input(folder: Path, inputs: Mapping[str, Path | None]) -> None:
    """Refuse an output that an input is, or lies in; inside an input nothing of it can be replaced."""
    for name, path in inputs.items():
        if path is not None and path.resolve().is_relative_to(folder):
            raise UserError(f"OUT {folder}: {name} is {path}, which would be replaced by it; choose another folder")


def _refuse_foreign(folder: Path, overwrite: bool) -> None:
    """Refuse what is there, unless it is empty, or a conversion wrote it and it may be replaced."""
    if not folder.exists() or (folder.is_dir() and all(path.name == _UNFINISHED for path in folder.iterdir())):
        return
    foreign = _foreign(folder)
    if foreign is not None:
        raise UserError(
            f"OUT {folder}: something is there already, which not even --overwrite replaces: {foreign}; choose another "
            "folder, or move it away"
        )
    if not overwrite:
        raise UserError(f"OUT {folder}: something is there already; choose another folder, or give --overwrite")


def _foreign(folder: Path) -> str | None:
    """Why a folder is not what a conversion wrote, and nothing else; None where it is."""
    if not folder.is_dir():
        return "it is a file"
    record = _record(folder)
    if not record:
        return f"no conversion wrote it (it has no {RECORD} that says so)"
    # Without the files' names it is not whole, and what is in it is a conversion's own.
    added = sorted(set(_files(folder)) - set(record["files"])) if "files" in record else []
    return f"it has {added[0]}, which no conversion wrote" if added else None


def _record(folder: Path) -> dict[str, Any]:
    """A folder's record; empty where it has none, or one of somebody else."""
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("written_by") == _WRITER else {}


def _write_record(folder: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all: a kill leaves the former record."""
    partial = folder / _UNFINISHED
    partial.write_text(json.dumps({"written_by": _WRITER, **content}, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / RECORD)


def _files(folder: Path) -> list[str]:
    """All files below, and folders without any, but the record."""
    found = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir() or not any(path.iterdir())]
    return sorted(str(path.relative_to(folder)) for path in found if path != folder / RECORD)


def _remove(folder: Path) -> None:
    """Remove a folder of a conversion's, the record at last: after a kill it is still known."""
    if not folder.exists():
        return
    for path in folder.iterdir():
        if path.name == RECORD:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / RECORD).unlink(missing_ok=True)
    folder.rmdir()
