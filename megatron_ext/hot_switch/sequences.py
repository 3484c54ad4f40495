# SPDX-License-Identifier: Apache-2.0
"""Sequences: documents, long ones in pieces, in an order that is a function of the seed alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import UserError

__all__ = ["Sequence", "SequenceOrder"]


@dataclass(frozen=True)
class Sequence:
    """A document, or a piece of one."""

    document: int
    """The document, from 0."""

    offset: int
    """First token within the document."""

    positions: int
    """Tokens that are predicted. As many are read, and the first one to read is `offset`, so that the sequence
    covers `positions + 1` tokens: the last one is only predicted."""


class SequenceOrder:
    """All sequences of a corpus, epoch after epoch, each epoch in an order of its own.

    Every token of a document but the first is predicted exactly once per epoch. What a run has read is one number, so
    that a run can go on anywhere.

    Attributes:
        per_epoch: sequences in one epoch.
    """

    def __init__(self, document_lengths: npt.NDArray[np.integer], *, longest: int, seed: int) -> None:
        """Cut the documents.

        Args:
            document_lengths: tokens of each document. Those with fewer than two have nothing to predict and are
                left out.
            longest: most positions of a sequence; a longer document becomes several.
            seed: of the order.

        Raises:
            UserError: no document has two tokens.
        """
        lengths = np.asarray(document_lengths, dtype=np.int64)
        self._positions = np.maximum(lengths - 1, 0)
        self._longest = longest
        self._seed = seed
        # Document d has the sequences from _ends[d - 1] to _ends[d] - 1.
        self._ends = np.cumsum(-(-self._positions // longest))
        self.per_epoch = int(self._ends[-1]) if len(self._ends) else 0
        if self.per_epoch == 0:
            raise UserError("the training data has no document of two or more tokens; give a larger corpus")
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def at(self, place: int) -> Sequence:
        """Return the sequence at a place of the endless order, from 0."""
        epoch, within = divmod(place, self.per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.per_epoch)
        number = int(self._order[within])
        document = int(np.searchsorted(self._ends, number, side="right"))
        first = int(self._ends[document - 1]) if document else 0
        offset = (number - first) * self._longest
        return Sequence(document, offset, min(self._longest, int(self._positions[document]) - offset))
