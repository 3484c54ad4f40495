# SPDX-License-Identifier: Apache-2.0
"""Folders that appear under their name only when they are whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["fresh_folder", "resumed_folder"]

_TASK = "conversion.json"
"""What a folder that is not whole is to become."""


@contextmanager
def fresh_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a folder to write into, which becomes `target` when the block ends without an error.

    Args:
        target: the folder to be.
        overwrite: whether one that is there is replaced, in the end.

    Raises:
        UserError: it is there, and not empty, and `overwrite` is not given; or it cannot be written.
    """
    with resumed_folder(target, None, overwrite=overwrite) as partial:
        yield partial


@contextmanager
def resumed_folder(target: Path, task: Mapping[str, Any] | None, *, overwrite: bool) -> Iterator[Path]:
    """Give a folder as `fresh_folder` does, with what an earlier run of the same task wrote that was cut off.

    Args:
        target: the folder to be.
        task: what tells that the task is the same; None for never.
        overwrite: whether one that is there is replaced, in the end.

    Raises:
        UserError: as for `fresh_folder`.
    """
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: something is there already; choose another folder, or give --overwrite")
    partial = target.parent / f"{target.name}.partial"
    said = json.dumps(task, sort_keys=True)
    try:
        if task is None or not (partial / _TASK).exists() or (partial / _TASK).read_text(encoding="utf-8") != said:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / _TASK).write_text(said, encoding="utf-8")
        yield partial
        (partial / _TASK).unlink()
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error})") from error
