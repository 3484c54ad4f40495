# SPDX-License-Identifier: Apache-2.0
"""The order of the sequences of several corpora, each of which has its share of the tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_ext.hot_switch.data.document_source import Documents
from megatron_ext.hot_switch.data.sequences import Sequence, SequenceOrder
from megatron_ext.hot_switch.data.training_documents import JoinedDocuments

__all__ = ["BlendedOrder", "order_of"]


def order_of(
    documents: Documents, *, longest: int, seed: int, part: tuple[int, int] = (0, 1)
) -> SequenceOrder | BlendedOrder:
    """Return the order in which a run reads the sequences of its documents.

    Args:
        documents: what it reads.
        longest: as for `SequenceOrder`.
        seed: as for `SequenceOrder`.
        part: as for `SequenceOrder`.

    Raises:
        UserError: as for `SequenceOrder`.
    """
    if isinstance(documents, JoinedDocuments) and documents.weights is not None:
        lengths = [corpus.lengths for corpus in documents.corpora]
        return BlendedOrder(lengths, documents.weights, longest=longest, seed=seed, part=part)
    return SequenceOrder(documents.lengths, longest=longest, seed=seed, part=part)


class BlendedOrder:
    """Sequences of several corpora in turn. Like `SequenceOrder` it is a function of the place alone.

    Weights are shares of the predicted tokens, as Megatron's are of samples of constant length. A corpus has sequences
    in proportion to its weight over the mean length of its sequences, spread evenly over a period that repeats; each
    corpus is read in the order that it would have alone, epoch after epoch.

    Attributes:
        per_epoch: sequences of all corpora, each once.
    """

    PERIOD = 100_000

    def __init__(
        self,
        document_lengths: Several[npt.NDArray[np.integer]],
        weights: Several[float],
        *,
        longest: int,
        seed: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Share out the places of a period.

        Args:
            document_lengths: for each corpus the tokens of its documents.
            weights: of the corpora, all above 0.
            longest: as for `SequenceOrder`.
            seed: as for `SequenceOrder`.
            part: as for `SequenceOrder`.

        Raises:
            UserError: as for `SequenceOrder`.
        """
        self._orders = [SequenceOrder(lengths, longest=longest, seed=seed) for lengths in document_lengths]
        self._index, self._count = part
        self._firsts = np.cumsum([0, *(len(lengths) for lengths in document_lengths)])
        self.per_epoch = sum(order.per_epoch for order in self._orders)
        means = [
            np.maximum(np.asarray(lengths, dtype=np.int64) - 1, 0).sum() / order.per_epoch
            for lengths, order in zip(document_lengths, self._orders, strict=True)
        ]
        wanted = np.array(weights, dtype=np.float64) / np.array(means)
        # A corpus that is asked for has a sequence in every period.
        self._per_period = np.maximum(1, np.round(wanted / wanted.sum() * self.PERIOD)).astype(np.int64)
        corpora = np.repeat(np.arange(len(self._orders)), self._per_period)
        turns = np.concatenate([np.arange(count) for count in self._per_period])
        by_time = np.lexsort((corpora, (turns + 0.5) / self._per_period[corpora]))
        self._corpora, self._turns = corpora[by_time], turns[by_time]

    def at(self, place: int) -> Sequence:
        """Return the sequence at a place, from 0; documents are numbered over all corpora."""
        period, within = divmod(place * self._count + self._index, len(self._corpora))
        corpus = int(self._corpora[within])
        turn = period * int(self._per_period[corpus]) + int(self._turns[within])
        found = self._orders[corpus].at(turn)
        return replace(found, document=int(self._firsts[corpus]) + found.document)

    def positions(self, place: int, count: int) -> npt.NDArray[np.int64]:
        """Return the positions of the `count` sequences from a place on."""
        return np.array([self.at(each).positions for each in range(place, place + count)], dtype=np.int64)
