# SPDX-License-Identifier: Apache-2.0
"""Files whose contents are over, kept to be written again.

A server writes the same amounts in every round. What a file has in memory and on the disk is found again where it is
overwritten; a new file takes fresh pages of both, which costs a multiple of the copying.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["SpareFiles"]


class SpareFiles:
    """Spare files of one kind. May be used by several threads."""

    def __init__(self, folder: Path, most: int) -> None:
        """Begin without any.

        Args:
            folder: for the files, on the file system of those that they were and will be; what a former process has
                left there is removed with the first use, so that a start that is refused removes nothing.
            most: how many are kept.
        """
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        self._files: list[Path] = []
        self._number = 0
        self._is_begun = False

    def keep(self, path: Path) -> None:
        """Take a file away, as a spare one while there is room for it and no other process reads it."""
        with self._lock:
            self._begin()
            spare = self._folder / str(self._number + 1)
            # A spare file is no more than a convenience: perhaps the disk is full, which must end no round.
            with suppress(OSError):
                if len(self._files) < self._most:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    os.replace(path, spare)
                    if _is_unshared(spare):
                        self._number += 1
                        self._files.append(spare)
                        return
            for left in (path, spare):
                with suppress(OSError):
                    left.unlink()

    def take(self, path: Path) -> None:
        """Give a spare file a name, if there is one; nothing else has the name."""
        with self._lock:
            self._begin()
            if self._files:
                os.replace(self._files.pop(), path)

    def _begin(self) -> None:
        """Remove what a former process has left."""
        if not self._is_begun:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._is_begun = True


def _is_unshared(path: Path) -> bool:
    """Return whether no other process has a file open or mapped, and no link gives it another name.

    The kernel gives a lease for writing to the only one who has a file open. Where it does not know leases, somebody
    may have it.
    """
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_nlink > 1:
            return False
        try:
            # A process that opens the file meanwhile is announced by this signal, which does nothing.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
    return True
