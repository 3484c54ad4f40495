# SPDX-License-Identifier: Apache-2.0
"""What hot switching needs to know of the documents that a run trains on, whatever they are read from."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import UserError

__all__ = ["Counted", "Documents", "Tokens", "require_rows"]

Tokens = npt.NDArray[np.integer]
Counted = npt.NDArray[np.bool_]


class Documents(Protocol):
    """Documents of tokens."""

    @property
    def lengths(self) -> Tokens:
        """Tokens of each document."""

    def read(self, document: int, offset: int, count: int) -> Tokens:
        """Return `count` tokens of a document, from token `offset` on."""

    def counted(self, document: int, offset: int, count: int) -> Counted | None:
        """Return which of these tokens count in the loss where they are predicted; None where all of them do."""
        return None


def require_rows(tokens: Tokens, rows: int | None, where: str) -> None:
    """Check that tokens have rows in the vocabulary: tensor parallelism would make zeros of others, and train on.

    Args:
        tokens: at least one.
        rows: of the vocabulary; None for any.
        where: what has them, to begin the message with.

    Raises:
        UserError: one has none.
    """
    if rows is None or (tokens.min() >= 0 and tokens.max() < rows):
        return
    wrong = tokens[(tokens < 0) | (tokens >= rows)]
    raise UserError(
        f"{where} has the token {wrong[0]}, and the vocabulary has the rows 0 to {rows - 1}; give the tokenizer or "
        "--vocab-size that the data were made with"
    )
