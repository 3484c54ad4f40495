# SPDX-License-Identifier: Apache-2.0
"""Folders that appear under their name only when they are whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["identity", "resumed_folder"]

_TASK = "conversion.json"
"""What a folder that is not whole is to become."""


@contextmanager
def resumed_folder(target: Path, task: Mapping[str, Any], *, overwrite: bool) -> Iterator[Path]:
    """Give a folder to write into, which becomes `target` when the block ends without an error.

    What an earlier run of the same task wrote that was cut off is in it. At no time is `target` there in part.

    Args:
        target: the folder to be.
        task: what tells that the task is the same.
        overwrite: whether one that is there is replaced, in the end.

    Raises:
        UserError: it is there, and not empty, and `overwrite` is not given; or it cannot be written.
    """
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: something is there already; choose another folder, or give --overwrite")
    partial, former = (target.parent / f"{target.name}.{state}" for state in ("partial", "former"))
    said = json.dumps(task, sort_keys=True)
    try:
        if not (partial / _TASK).exists() or (partial / _TASK).read_text(encoding="utf-8") != said:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / _TASK).write_text(said, encoding="utf-8")
        yield partial
        (partial / _TASK).unlink()
        if target.exists():
            shutil.rmtree(former, ignore_errors=True)
            target.rename(former)
        partial.rename(target)
        shutil.rmtree(former, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error})") from error


def identity(files: Iterable[Path]) -> list[list[object]]:
    """Return that by which a source that was changed meanwhile is known."""
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
