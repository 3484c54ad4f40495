# SPDX-License-Identifier: Apache-2.0
"""Python's own standard library as a corpus: real text that is on every machine, nothing to download."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from megatron_ext.errors import UserError

__all__ = ["STDLIB_EXCLUDES", "STDLIB_GLOBS", "STDLIB_SHUFFLE_SEED", "standard_library_sources"]

STDLIB_GLOBS = ("*.py",)
"""Only source files."""

STDLIB_EXCLUDES = ("site-packages", "dist-packages", "__pycache__")
"""Folders inside the library's folder that hold other people's code or no source."""

STDLIB_SHUFFLE_SEED = 1234
"""Documents are shuffled, so that the end of the corpus, where Megatron's --split takes its validation set,
is not just the modules from `x` to `z`."""


def standard_library_sources() -> Path:
    """Return the folder of the running Python's standard library.

    About 1,800 files and 31 MB where the library's own tests are installed; some distributions pack those
    apart, then it is about a third of that.

    Raises:
        UserError: This Python has its library inside a zip file or not at all.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "os.py").is_file():
        raise UserError(
            f"--stdlib: {folder} does not hold Python's source files; give a folder of text instead"
        )
    return folder
