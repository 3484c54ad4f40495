# SPDX-License-Identifier: Apache-2.0
"""Files that an option names and a command or a run writes, looked at before its work.

A folder that is not there is a typing error more often than a wish, so that it is not made. A folder that an option
names, as --save does, is made, and so is one of `megatron-ext evaluate`, which has looked at it before its work.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["output_problems"]


def output_problems(option: str, file: Path) -> list[str]:
    """Return why a file cannot be written, in one sentence; nothing where it can.

    Args:
        option: that names the file.
        file: its path.
    """
    if file.is_dir():
        return [f"{option} {file} is a folder; name a file"]
    if not file.parent.is_dir():
        return [f"{option} {file}: there is no folder {file.parent}; make it first"]
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return [f"{option} {file}: cannot be written; give another file"]
    return []
