# SPDX-License-Identifier: Apache-2.0
"""SPES's load-balancing loss, under which a peer's own experts get more tokens at first (arXiv 2602.11543).

The tokens of the experts that a peer owns count less than 1, so that they look less loaded than they are:

    L = E w / (layers tokens k) sum over layers l and experts e of f_e n_le p_le

with n the tokens that an expert got, p the mean probability that the router gave it, f_e the factor of owned experts
and 1 for all others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

__all__ = ["count_weights", "decayed_factor", "load_balancing_loss"]

_FIRST = 0.7
_SHARE = 0.2
"""Of the training; afterwards the factor is 1."""


def decayed_factor(step: int, total_steps: int, update_steps: int = 1) -> float:
    """Return the factor of a peer's own experts at a step.

    0.7 + 0.3 s / (0.2 total) until a fifth of the training is over, then 1, with s the last multiple of `update_steps`.
    It depends on nothing else, so that a resumed training continues with it. The paper's code trains its first
    `update_steps` steps, and those after a resume, with a factor of 1.

    Args:
        step: steps that were made, 0 or more.
        total_steps: of the whole training.
        update_steps: steps between two changes.
    """
    end = int(_SHARE * total_steps)
    at = step // update_steps * update_steps
    return _FIRST + (1 - _FIRST) * at / (_SHARE * total_steps) if at < end else 1.0


def count_weights(experts: int, owned: Collection[int], factor: float) -> torch.Tensor:
    """Return by what to multiply the experts' token counts.

    Args:
        experts: number of experts.
        owned: those that this peer trains.
        factor: of those.

    Returns:
        fp32, (experts,).
    """
    weights = torch.ones(experts)
    weights[sorted(owned)] = factor
    return weights


def load_balancing_loss(
    counts: Sequence[torch.Tensor],
    probabilities: Sequence[torch.Tensor],
    *,
    topk: int,
    weight: float,
    count_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the loss of layers that are available together; multiplying a router's counts gives the same loss.

    Args:
        counts: by layer, the tokens that every expert got, (experts,).
        probabilities: by layer, the router's probabilities, (tokens, experts).
        topk: experts per token.
        weight: of the loss.
        count_weights: as `count_weights` returns them.
    """
    tokens, experts = probabilities[0].shape
    total = torch.stack(
        [
            (count_weights * count.float() * found.float().mean(dim=0)).sum()
            for count, found in zip(counts, probabilities, strict=True)
        ]
    ).sum()
    return total * (experts * weight / (len(counts) * tokens * topk))
