# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a Hugging Face model on a part of a corpus in Megatron's format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from megatron_ext.data.corpus_files import check_corpus
from megatron_ext.data.split import parts_of
from megatron_ext.errors import UserError, combine
from megatron_ext.evaluation.perplexity_config import PerplexityConfig
from megatron_ext.quietly import quietly

__all__ = ["measure_perplexity"]

_PARTS = ("training", "validation", "test")


def measure_perplexity(
    model: Any, prefix: str, config: PerplexityConfig, tell: Callable[[int], None] = lambda tokens: None
) -> dict[str, float]:
    """Return what a model's perplexity is on a part of a corpus.

    The part's documents follow each other in their order, and are cut into sequences that do not overlap: the first
    token of each is predicted from the last one of the sequence before alone, as in Megatron's own samples.

    Args:
        model: as transformers has loaded it; its device is where it runs.
        prefix: of a .bin/.idx pair.
        config: of what.
        tell: is told how many tokens were predicted so far.

    Returns:
        `tokens` (predicted), `loss` (nats per token) and `perplexity` (its exponential).

    Raises:
        UserError: the corpus or the part is not there, or has ids that the model does not; or its loss is non-finite.
    """
    if problems := config.problems():
        raise combine(problems, "evaluate")
    tokens = _tokens(prefix, config)
    rows = int(model.config.vocab_size)
    total, count = 0.0, 0
    for batch in _batches(tokens, config):
        if (largest := int(batch.max())) >= rows or int(batch.min()) < 0:
            raise UserError(
                f"{prefix}: has the id {largest}, and the model's vocabulary {rows} rows: the corpus was made with "
                "another tokenizer"
            )
        inputs = batch[:, :-1].to(model.device)
        with torch.no_grad():
            logits = model(inputs, use_cache=False).logits.float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten().to(model.device), reduction="none"
        )
        total += float(losses.double().sum())
        if not math.isfinite(total):
            raise UserError(
                f"--data {prefix}: the model's loss is {total} after {count} tokens: it has "
                "non-finite weights, or computes values that its type cannot hold, for which --dtype fp32 may have room"
            )
        count += losses.numel()
        tell(count)
    return {"tokens": count, "loss": total / count, "perplexity": math.exp(min(total / count, 700.0))}


def _tokens(prefix: str, config: PerplexityConfig) -> np.ndarray[Any, Any]:
    """All tokens of the part, as they are on the disk."""
    check_corpus(prefix, option="--data")
    with quietly():
        # The .idx format is Megatron's own.
        from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    documents = np.asarray(dataset.document_indices)
    part = parts_of(len(documents) - 1, config.split)[_PARTS.index(config.part)]
    if part is None or part[0] == part[1]:
        raise UserError(f"--split {config.split} leaves no document of {prefix} for {config.part}")
    first, last = (int(documents[place]) for place in part)
    lengths = np.asarray(dataset.sequence_lengths, dtype=np.int64)
    begin, count = int(lengths[:first].sum()), int(lengths[first:last].sum())
    if count < 2:
        raise UserError(f"{prefix}: the {config.part} part has {count} tokens, of which none can be predicted")
    whole = np.memmap(prefix + ".bin", dtype=dataset.index.dtype, mode="r")
    return whole[begin : begin + count]


def _batches(tokens: np.ndarray[Any, Any], config: PerplexityConfig) -> Iterator[torch.Tensor]:
    """Rows of one token more than a sequence has; the last one may be shorter, and is then alone."""
    length = config.sequence_length
    predicted = len(tokens) - 1
    if config.max_tokens:
        predicted = min(predicted, config.max_tokens)
    whole = predicted // length
    for first in range(0, whole, config.batch_size):
        rows = range(first, min(first + config.batch_size, whole))
        yield torch.stack([_row(tokens, row * length, length) for row in rows])
    if rest := predicted % length:
        yield _row(tokens, whole * length, rest)[None]


def _row(tokens: np.ndarray[Any, Any], begin: int, length: int) -> torch.Tensor:
    return torch.from_numpy(tokens[begin : begin + length + 1].astype(np.int64))
