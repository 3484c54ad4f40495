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
    that a run can continue anywhere. Jobs that train together without knowing each other read parts: sequence k of part
    i of n is sequence k * n + i of the whole, whatever a job's strategies and batch size are.

    Attributes:
        per_epoch: sequences in one epoch of the whole.
    """

    def __init__(
        self, document_lengths: npt.NDArray[np.integer], *, longest: int, seed: int, part: tuple[int, int] = (0, 1)
    ) -> None:
        """Cut the documents.

        Args:
            document_lengths: tokens of each document. Those with fewer than two have nothing to predict and are
                left out.
            longest: most positions of a sequence; a longer document becomes several.
            seed: of the order of the whole.
            part: (index, count) of the part to read.

        Raises:
            UserError: no document has two tokens.
        """
        lengths = np.asarray(document_lengths, dtype=np.int64)
        self._positions = np.maximum(lengths - 1, 0)
        self._longest = longest
        self._seed = seed
        self._index, self._count = part
        # Document d has the sequences from _ends[d - 1] to _ends[d] - 1.
        self._ends = np.cumsum(-(-self._positions // longest))
        self.per_epoch = int(self._ends[-1]) if len(self._ends) else 0
        if self.per_epoch == 0:
            raise UserError("the training data has no document of two or more tokens; give a larger corpus")
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def at(self, place: int) -> Sequence:
        """Return the sequence at a place of the part's endless order, from 0."""
        number = self._number(place)
        document = int(np.searchsorted(self._ends, number, side="right"))
        first = int(self._ends[document - 1]) if document else 0
        offset = (number - first) * self._longest
        return Sequence(document, offset, min(self._longest, int(self._positions[document]) - offset))

    def positions(self, place: int, count: int) -> npt.NDArray[np.int64]:
        """Return the positions of the `count` sequences from a place on, without looking for each of them alone."""
        numbers = np.array([self._number(each) for each in range(place, place + count)], dtype=np.int64)
        documents = np.searchsorted(self._ends, numbers, side="right")
        firsts = np.where(documents > 0, self._ends[documents - 1], 0)
        left: npt.NDArray[np.int64] = self._positions[documents] - (numbers - firsts) * self._longest
        return left.clip(max=self._longest)

    def _number(self, place: int) -> int:
        """Return which of the corpus's sequences stands at a place of the part."""
        epoch, within = divmod(place * self._count + self._index, self.per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.per_epoch)
        return int(self._order[within])
