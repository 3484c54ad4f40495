# SPDX-License-Identifier: Apache-2.0
"""Lengths of documents, and a batch that is typical of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_ext.data.corpus_files import HEAD_BYTES, check_index
from megatron_ext.errors import UserError

__all__ = ["read_lengths", "typical_batch"]


def read_lengths(path: Path) -> npt.NDArray[np.int64]:
    """Return the tokens of every document.

    Args:
        path: the .idx file of a Megatron corpus, its prefix, or a text file with a number per line.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    index = path if path.suffix == ".idx" or not path.name else path.with_name(path.name + ".idx")
    if index.is_file():
        return _read_index(index)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--lengths {path}: cannot be read ({error}); give the prefix of a .bin/.idx corpus, or a text file with "
            "one number of tokens per line"
        ) from None
    found = []
    for number, line in enumerate(lines, start=1):
        if text := line.strip():
            # int() would take other scripts' digits, and numpy no larger number.
            if not (text.isascii() and text.isdecimal() and len(text) <= 10):
                raise UserError(
                    f"--lengths {path}, line {number}: {text[:40]!r} is not a number of tokens; give one per line"
                )
            found.append(int(text))
    return np.array(found, dtype=np.int64)


def _read_index(path: Path) -> npt.NDArray[np.int64]:
    return np.fromfile(path, dtype="<i4", count=check_index(path), offset=HEAD_BYTES).astype(np.int64)


def typical_batch(documents: npt.NDArray[np.int64], *, sequences: int, context: int) -> Sequence[int]:
    """Return positions of the sequences of a batch whose lengths are spread like those of a corpus.

    Args:
        documents: tokens of each document; those longer than the context become several sequences.
        sequences: of the batch.
        context: positions of the longest sequence.

    Returns:
        The quantiles of the corpus's sequences, ascending.

    Raises:
        UserError: no document has two tokens.
    """
    positions = documents[documents > 1] - 1
    if not len(positions):
        raise UserError("no document has two or more tokens, so there is nothing to predict; give other lengths")
    whole, rest = int((positions // context).sum()), positions % context
    # In ascending order: what is shorter than the context, then as many of its length as there are.
    shorter = np.sort(rest[rest > 0])
    places = ((np.arange(sequences) + 0.5) / sequences * (len(shorter) + whole)).astype(np.int64)
    return [int(shorter[place]) if place < len(shorter) else context for place in places]
