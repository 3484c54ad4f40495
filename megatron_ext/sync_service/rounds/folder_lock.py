# SPDX-License-Identifier: Apache-2.0
"""The lock of a server's folder: who has it is the only one that changes what is in there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.errors import UserError

__all__ = ["locked"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep servers away from a folder, which is there, until the end of the block.

    Raises:
        UserError: a server uses it, or the folder cannot be used.
    """
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"dir {folder}: cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UserError(f"dir {folder}: another server uses it; stop that one, or give another folder") from error
    try:
        yield
    finally:
        os.close(handle)
