# SPDX-License-Identifier: Apache-2.0
"""The data of a training step: which sequences, in which rows, for which strategy and replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.hot_switch.data.blends import order_of
from megatron_ext.hot_switch.data.document_source import Documents
from megatron_ext.hot_switch.data.packing import StrategyBatch, plan_batch
from megatron_ext.hot_switch.data.rows import Excerpt, PackedBatch, pack_rows
from megatron_ext.hot_switch.data.sequences import Sequence
from megatron_ext.hot_switch.strategies.strategy_list import StrategyList

__all__ = ["BatchReader", "GlobalBatch"]


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """A worker's share of a global batch, split over the strategies; the same on all of its ranks."""

    sequences: tuple[Sequence, ...]
    """What is trained, in the order in which it was drawn."""

    parts: tuple[StrategyBatch | None, ...]
    """What each strategy does of it, home first; None for a guest without data."""

    @property
    def predicted(self) -> int:
        """Tokens that are predicted."""
        return sum(sequence.positions for sequence in self.sequences)

    @property
    def trained_micro_batches(self) -> int:
        """Micro-batches with something to predict, of all replicas and strategies."""
        return sum(
            any(rows) for part in self.parts if part is not None for replica in part.micro_batches for rows in replica
        )

    @property
    def padding_ratio(self) -> float:
        """Positions that are computed for nothing, as a part of all that are computed."""
        return 1.0 - self.predicted / sum(part.positions for part in self.parts if part is not None)


class BatchReader:
    """Reads global batches. Where it reads is a function of the sequences consumed, so it has no state to save."""

    def __init__(
        self,
        documents: Documents,
        strategies: StrategyList,
        *,
        seed: int,
        part: tuple[int, int] = (0, 1),
        packs: bool = True,
    ) -> None:
        """Prepare to read.

        Args:
            documents: what to read.
            strategies: with buckets.
            seed: of the order.
            part: (index, count) of the part of the sequences to read.
            packs: as for `plan_batch`.
        """
        self._documents = documents
        self._strategies, self._packs = strategies, packs
        self._order = order_of(documents, longest=strategies.buckets[0].up_to, seed=seed, part=part)

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences in one epoch of the whole."""
        return self._order.per_epoch

    def plan(self, consumed: int, size: int) -> GlobalBatch:
        """Return the batch of `size` sequences that comes after `consumed` ones of the part. Reads no tokens."""
        sequences = tuple(self._order.at(place) for place in range(consumed, consumed + size))
        parts = plan_batch([sequence.positions for sequence in sequences], self._strategies, packs=self._packs)
        return GlobalBatch(sequences=sequences, parts=parts)

    def positions(self, consumed: int, size: int) -> npt.NDArray[np.int64]:
        """Return the predicted tokens of each of the `size` sequences that come after `consumed` ones."""
        return self._order.positions(consumed, size)

    def read(self, batch: GlobalBatch, strategy: int, replica: int) -> list[PackedBatch]:
        """Return the micro-batches of one data-parallel replica under one strategy that has data."""
        part = batch.parts[strategy]
        assert part is not None
        return [
            pack_rows([[self._excerpt(batch.sequences[each]) for each in row] for row in rows], part.row_length)
            for rows in part.micro_batches[replica]
        ]

    def _excerpt(self, sequence: Sequence) -> Excerpt:
        document, offset, positions = sequence.document, sequence.offset, sequence.positions
        counted = self._documents.counted(document, offset + 1, positions)
        return Excerpt(self._documents.read(document, offset, positions + 1), counted)
