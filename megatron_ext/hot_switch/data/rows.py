# SPDX-License-Identifier: Apache-2.0
"""The tensors of a micro-batch of packed rows, and the attention mask that keeps its documents apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Excerpt", "PackedBatch", "document_lengths", "document_mask", "pack_rows"]

_PADDING = -1


@dataclass(frozen=True, eq=False)
class Excerpt:
    """What is read of a document for one sequence."""

    tokens: npt.NDArray[np.integer]
    """One more than the sequence has positions: the last one is only predicted."""

    counted: npt.NDArray[np.bool_] | None = None
    """For each position whether the token that it predicts counts in the loss; None where all of them do."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch. All tensors have the shape (rows, positions)."""

    tokens: torch.Tensor
    """int64, 0 where there is padding."""

    labels: torch.Tensor
    """int64: the token that follows in the document."""

    loss_mask: torch.Tensor
    """float32: 1 where a token is predicted that counts in the loss, 0 where one does not or there is padding."""

    position_ids: torch.Tensor
    """int64, from 0 in each sequence."""

    segments: torch.Tensor
    """int64: which sequence of its row a position belongs to, from 0; -1 for padding."""


def pack_rows(rows: Sequence[Sequence[Excerpt]], length: int) -> PackedBatch:
    """Lay sequences one behind the other.

    Args:
        rows: for each row what its sequences are.
        length: positions of every row, at least as many as the sequences of a row have together.
    """
    shape = (len(rows), length)
    # Copies to a GPU wait for nothing from pinned memory, which is what Megatron's own loaders give.
    pinned = torch.cuda.is_available()
    batch = PackedBatch(
        tokens=torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
        labels=torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
        loss_mask=torch.zeros(shape, pin_memory=pinned),
        position_ids=torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
        segments=torch.full(shape, _PADDING, dtype=torch.int64, pin_memory=pinned),
    )
    tokens, labels, loss_mask = batch.tokens.numpy(), batch.labels.numpy(), batch.loss_mask.numpy()
    position_ids, segments = batch.position_ids.numpy(), batch.segments.numpy()
    for row, sequences in enumerate(rows):
        first = 0
        for segment, sequence in enumerate(sequences):
            end = first + len(sequence.tokens) - 1
            tokens[row, first:end] = sequence.tokens[:-1]
            labels[row, first:end] = sequence.tokens[1:]
            loss_mask[row, first:end] = 1.0 if sequence.counted is None else sequence.counted
            position_ids[row, first:end] = np.arange(end - first)
            segments[row, first:end] = segment
            first = end
    return batch


def document_lengths(segments: torch.Tensor) -> torch.Tensor:
    """Return the lengths of the sequences of packed rows, which say as much as their mask.

    Args:
        segments: `PackedBatch.segments`, shape (rows, positions), on the CPU.

    Returns:
        int64, shape (rows, sequences of the row that has the most): in order, 0 where a row has no more.
    """
    count = int(segments.max()) + 1
    return torch.stack([torch.bincount(row[row >= 0], minlength=count) for row in segments])


def document_mask(segments: torch.Tensor) -> torch.Tensor:
    """Return Megatron's attention mask for packed rows: a position sees itself and what precedes it in its sequence.

    Args:
        segments: `PackedBatch.segments`, shape (rows, positions).

    Returns:
        bool, True where attention is forbidden, shape (rows, 1, positions, positions).
    """
    length = segments.shape[1]
    later = torch.ones((length, length), dtype=torch.bool, device=segments.device).triu(1)
    return ((segments[:, :, None] != segments[:, None, :]) | later)[:, None]
