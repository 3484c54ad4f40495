# SPDX-License-Identifier: Apache-2.0
"""Files that are still there, whole, after the machine has lost its power; and why one cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["described", "lacks_descriptors", "replace_file", "sync_path"]


def described(error: OSError) -> str:
    """Return what an error says, with the fix where the disk is not the reason."""
    if not lacks_descriptors(error):
        return str(error)
    return (
        f"{error}: the server's process has no file descriptor left, and its disk is not the reason; raise the hard "
        "limit it is started with (ulimit -Hn, or LimitNOFILE= of a systemd unit), or lower connections in its "
        "configuration"
    )


def lacks_descriptors(error: OSError) -> bool:
    """Return whether too many files are open."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


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
