# SPDX-License-Identifier: Apache-2.0
"""Writes documents with Megatron's own builder, in the order they come or shuffled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.encode import EncodedBatch
from megatron_ext.data.progress import PrepareProgress
from megatron_ext.quietly import quietly

__all__ = ["CorpusWriter", "documents_of", "open_writer", "write_shuffled"]


def _indexed_dataset() -> Any:
    """Import Megatron's module for the file format."""
    with quietly():
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


class CorpusWriter:
    """Writes NAME.bin and NAME.idx into a folder."""

    def __init__(self, folder: Path, name: str, dtype: type[np.uint16] | type[np.int32]) -> None:
        """Open the data file.

        Args:
            folder: An existing folder.
            name: File name without suffix.
            dtype: Type of a token on disk.
        """
        self.documents = 0
        self.tokens = 0
        self._index_path = folder / f"{name}.idx"
        self._builder = _indexed_dataset().IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)

    def add(self, document: NDArray[Any]) -> None:
        """Append one document: 1-D tokens of the writer's dtype, end-of-document id included."""
        self._builder.add_document(document, [int(document.size)])
        self.documents += 1
        self.tokens += int(document.size)

    def finish(self) -> None:
        """Write the index."""
        self._builder.finalize(str(self._index_path))

    def abandon(self) -> None:
        """Close the data file of a corpus that will not be finished."""
        with contextlib.suppress(OSError):  # such as a full disk, which is being reported already
            self._builder.data_file.close()


@contextlib.contextmanager
def open_writer(folder: Path, name: str, dtype: type[np.uint16] | type[np.int32]) -> Iterator[CorpusWriter]:
    """Open a writer that writes its index when the block ends well, and only then."""
    writer = CorpusWriter(folder, name, dtype)
    try:
        yield writer
    except BaseException:  # Ctrl-C too: no half corpus stays
        writer.abandon()
        raise
    writer.finish()


def documents_of(batch: EncodedBatch) -> Iterator[NDArray[Any]]:
    """Yield each document's tokens as a view."""
    start = 0
    for length in batch.lengths:
        yield batch.tokens[start : start + length]
        start += length


def write_shuffled(
    folder: Path,
    source_name: str,
    name: str,
    dtype: type[np.uint16] | type[np.int32],
    *,
    seed: int,
    progress: PrepareProgress,
) -> None:
    """Write the documents of one corpus in random order into another, and delete the first.

    Args:
        folder: Holds both.
        source_name: File name, without suffix, of the finished corpus to read.
        name: File name, without suffix, of the corpus to write.
        dtype: Type of a token on disk, the same in both.
        seed: 0 to 2**32 - 1. The same seed and document count give the same order with every numpy release.
        progress: Told of every document's bytes.
    """
    with quietly():  # Megatron's logging wonders which rank this process has; it has none
        source = _indexed_dataset().IndexedDataset(str(folder / source_name))
    # RandomState, not Generator: numpy promises that its stream never changes.
    order = np.random.RandomState(seed).permutation(len(source))
    with open_writer(folder, name, dtype) as writer:
        for index in order:
            document = source[int(index)]
            writer.add(document)
            progress.advance(document.nbytes, 1)
    del source
    for suffix in ("bin", "idx"):
        (folder / f"{source_name}.{suffix}").unlink()
