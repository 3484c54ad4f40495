# SPDX-License-Identifier: Apache-2.0
"""Files whose contents are over, kept to be written again.

A server writes the same amounts in every round. What a file has in memory and on the disk is found again where it is
overwritten; a new file takes fresh pages of both, which costs a multiple of the copying.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

__all__ = ["SpareFiles"]


class SpareFiles:
    """Spare files of one kind. May be used by several threads."""

    def __init__(self, folder: Path, most: int) -> None:
        """Begin without any.

        Args:
            folder: for the files, on the file system of those that they were and will be; what is there is removed.
            most: how many are kept.
        """
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        self._files: list[Path] = []
        self._number = 0
        shutil.rmtree(folder, ignore_errors=True)

    def keep(self, path: Path) -> None:
        """Take a file away, as a spare one while there is room for it."""
        with self._lock:
            if len(self._files) >= self._most or not path.exists():
                path.unlink(missing_ok=True)
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            self._number += 1
            self._files.append(self._folder / str(self._number))
            os.replace(path, self._files[-1])

    def take(self, path: Path) -> None:
        """Give a spare file a name, if there is one; nothing else has the name."""
        with self._lock:
            if self._files:
                os.replace(self._files.pop(), path)
