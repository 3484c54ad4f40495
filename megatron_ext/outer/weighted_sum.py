# SPDX-License-Identifier: Apache-2.0
"""The sum of the workers' pseudo-gradients: the one place where they are added up.

Workers in a job, plain PyTorch and the sync service call it block by block with the terms in worker order, so that the
same pseudo-gradients and weights give the same bits wherever they meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["relative", "weighted_mean", "weighted_sum"]


def weighted_sum(terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return sum_i w_i t_i, added in the order of the terms, in the memory of the first one.

    Args:
        terms: fp32 tensors of one shape, at least one; they are used up. All but the first may be in the same memory,
            since each is asked for when the one before has been added.
        weights: one per term.
    """
    total: torch.Tensor | None = None
    for term, weight in zip(terms, weights, strict=True):
        if weight != 1:
            term.mul_(weight)
        total = term if total is None else total.add_(term)
    assert total is not None, "there is nothing to add up"
    return total


def relative(weights: Sequence[float]) -> list[float]:
    """Return weights as parts of the largest one: 1 for each where all are equal, whatever they add up to."""
    largest = max(weights)
    return [weight / largest for weight in weights] if largest > 0 else list(weights)


def weighted_mean(terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return sum_i w_i t_i / sum_i w_i, in the memory of the first term; zeros where all weights are 0.

    Equal weights give the plain mean whatever they are, and a single term comes out as it went in, to the last bit.

    Args:
        terms: as `weighted_sum` takes them.
        weights: one per term, 0 or more.
    """
    shares = relative(weights)
    total, divisor = weighted_sum(terms, shares), sum(shares)
    return total if divisor in (0, 1) else total.div_(divisor)
