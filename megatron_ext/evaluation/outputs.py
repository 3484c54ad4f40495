# SPDX-License-Identifier: Apache-2.0
"""Where results go: looked at before the evaluation, which may take hours, and free or of an earlier evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.evaluation.results import PICTURES, WRITER, read_results
from megatron_ext.extras import pip_install

__all__ = ["check_outputs"]

_HEAD = 65536
"""Bytes of a picture, among which it says what made it."""


def check_outputs(output: Path | None, picture: Path | None, baselines: Sequence[Path]) -> None:
    """Check that results and picture can be written, and replace nothing but an evaluation's.

    Args:
        output: of the results; None for no file.
        picture: the bars'; None for none.
        baselines: files of results that are read.

    Raises:
        UserError: one cannot be written, or is a file of something else.
    """
    for flag, path in (("--output", output), ("--picture", picture)):
        if path is None:
            continue
        if any(path.resolve() == other.resolve() for other in baselines):
            raise UserError(f"{flag} {path}: is a --baseline as well, which it would replace; choose another file")
        if path.exists():
            written = path.is_file() and (_is_picture(path) if flag == "--picture" else _has_results(path))
            if not written:
                raise UserError(f"{flag} {path}: is there already, and no evaluation wrote it; choose another file")
        above = next(folder for folder in path.resolve().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise UserError(f"{flag} {path}: cannot be written: {above} takes no files")
    if picture is not None:
        if picture.suffix.lower() not in PICTURES:
            raise UserError(f"--picture {picture}: give a name that ends in {' or '.join(PICTURES)}")
        if find_spec("matplotlib") is None:
            raise UserError(f"--picture needs matplotlib; run `{pip_install('matplotlib')}`")


def _has_results(path: Path) -> bool:
    try:
        read_results(path)
    except UserError:
        return False
    return True


def _is_picture(path: Path) -> bool:
    with path.open("rb") as file:
        return WRITER.encode() in file.read(_HEAD)
