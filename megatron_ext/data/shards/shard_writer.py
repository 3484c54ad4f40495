# SPDX-License-Identifier: Apache-2.0
"""Files of token ids of a limited size: headerless, little-endian, named PREFIX + process + number + .npy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["ShardWriter", "open_shards"]


@dataclass(kw_only=True)
class ShardWriter:
    """Writes the shards of one process."""

    folder: Path
    """Where to."""

    prefix: str
    """What the files' names begin with."""

    process: int
    """Which process this is, from 0."""

    dtype: np.dtype[Any]
    """Of an id on disk."""

    most_bytes: int
    """Of a file."""

    tokens: dict[str, int] = field(default_factory=dict)
    """Ids of each file, by its name, in order."""

    _file: BinaryIO | None = None
    _left: int = 0

    def add(self, document: NDArray[Any]) -> None:
        """Append a document, in a new file where the last one has no room; one that is longer than a file is cut."""
        ids = document.astype(self.dtype)
        most = self.most_bytes // self.dtype.itemsize
        if ids.size > self._left:
            self._next(most)
        for start in range(0, ids.size, most):
            if start > 0:
                self._next(most)
            piece = ids[start : start + most]
            assert self._file is not None
            self._file.write(piece.tobytes())
            self.tokens[Path(self._file.name).name] += int(piece.size)
            self._left -= int(piece.size)

    def close(self) -> None:
        """Finish the last file."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _next(self, most: int) -> None:
        self.close()
        name = f"{self.prefix}{self.process:03d}_{len(self.tokens):06d}.npy"
        self._file = (self.folder / name).open("wb")
        self.tokens[name] = 0
        self._left = most


@contextmanager
def open_shards(
    folder: Path, prefix: str, *, process: int, dtype: np.dtype[Any], most_bytes: int
) -> Iterator[ShardWriter]:
    """Open the shards of one process, of which there is none as long as nothing is added."""
    writer = ShardWriter(folder=folder, prefix=prefix, process=process, dtype=dtype, most_bytes=most_bytes)
    try:
        yield writer
    finally:
        writer.close()
