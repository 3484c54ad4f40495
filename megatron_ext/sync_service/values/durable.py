# SPDX-License-Identifier: Apache-2.0
"""Files that are still there, whole, after the machine has lost its power."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_file", "sync_path"]


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file: there is what was there before or all of this, whatever happens meanwhile."""
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    sync_path(beside)
    beside.replace(path)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Make a file's contents, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
