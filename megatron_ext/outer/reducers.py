# SPDX-License-Identifier: Apache-2.0
"""How the workers' pseudo-gradients become one: weighted means, and generalized task arithmetic.

Every reducer is a function of all workers' pseudo-gradients of the same elements, called by the elements' owner.
Sign consensus and normalisation therefore cost no further exchange.

Generalized task arithmetic (GTA, in EDiT's implementation): every element keeps only the workers whose weighted
pseudo-gradient points where the majority's does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron_ext.outer.reducer_config import GTAConfig

__all__ = ["Gta", "Linear", "Reducer", "build_reducer", "build_sparsifier", "sparsify"]

_TINY = 1e-8
Sparsification = Literal["magnitude", "random", "rescaled_random"]


class Reducer(Protocol):
    """Makes one pseudo-gradient of several."""

    def __call__(self, terms: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return the common pseudo-gradient.

        Args:
            terms: the accepted workers' pseudo-gradients, fp32 of one shape, in worker order, at least one; may be
                used up.
            weights: one per term, 0 or more.
        """


@dataclass(frozen=True, kw_only=True)
class Linear:
    """The weighted sum of the pseudo-gradients."""

    normalize: bool = True
    """Divide by the sum of the weights."""

    def __call__(self, terms: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return sum_i w_i t_i, divided by sum_i w_i when normalising."""
        divisor = _divisor(sum(weights)) if self.normalize else 1.0
        total = terms[0].mul_(weights[0] / divisor)
        for term, weight in zip(terms[1:], weights[1:], strict=True):
            total += term.mul_(weight / divisor)
        return total


@dataclass(frozen=True, kw_only=True)
class Gta:
    """Sums only what points where the majority does."""

    consensus: Literal["sum", "count"] | None
    """What decides an element's sign: the sum of the weighted pseudo-gradients, the number of workers on either side,
    or nothing."""

    normalize: bool = True
    """Divide every element by the weights of the workers that were summed."""

    int8_mask: bool = False
    """Compare signs as 8-bit integers, which takes a quarter of the memory."""

    def __call__(self, terms: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return sum_i m_i w_i t_i with m_i = [sign of w_i t_i = the majority's], divided by sum_i m_i w_i."""
        if self.consensus is None:
            return Linear(normalize=self.normalize)(terms, weights)
        weighted = [term.mul_(weight) for term, weight in zip(terms, weights, strict=True)]
        signs = [term.sign().to(torch.int8) if self.int8_mask else term.sign() for term in weighted]
        balance = _in_order(weighted) if self.consensus == "sum" else _in_order([sign.float() for sign in signs])
        majority = torch.where(balance >= 0, 1, -1).to(signs[0].dtype)
        total, divisor = torch.zeros_like(balance), torch.zeros_like(balance)
        for term, sign, weight in zip(weighted, signs, weights, strict=True):
            agrees = sign == majority
            total += term * agrees
            divisor += agrees * weight
        if self.normalize:
            total /= torch.where(divisor.abs() < _TINY, 1.0, divisor)
        return total


def sparsify(
    tensor: torch.Tensor, density: float, method: Sparsification, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return `tensor` with only a part of its elements.

    Args:
        tensor: any shape.
        density: fraction of elements to keep, in (0, 1]; 1 returns the tensor itself.
        method: 'magnitude' keeps the largest (at least one), 'random' each with probability `density`,
            'rescaled_random' the same, divided by `density`, so that the expectation stays.
        generator: of the random numbers.
    """
    if density >= 1:
        return tensor
    if method == "magnitude":
        kept = max(int(density * tensor.numel()), 1)
        size = tensor.reshape(-1).abs()
        smallest = size.topk(kept).values[-1]
        # Of several equal ones the first: which of them topk returns may differ between ranks.
        larger, equal = size > smallest, size == smallest
        mask = larger | (equal & (equal.cumsum(0) <= kept - larger.sum()))
        return torch.where(mask.view(tensor.shape), tensor, 0.0)
    mask = torch.bernoulli(torch.full_like(tensor, density), generator=generator)
    return tensor * mask / density if method == "rescaled_random" else tensor * mask


def build_reducer(config: GTAConfig) -> Reducer:
    """Return the reducer that a configuration asks for."""
    if config.reducer == "gta":
        return Gta(consensus=config.consensus_method, normalize=config.normalize, int8_mask=config.int8_mask)
    return Linear(normalize=config.normalize)


def build_sparsifier(config: GTAConfig) -> Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor] | None:
    """Return what thins out a pseudo-gradient, given the seed of its random numbers; None for nothing."""
    method = config.sparsification_method
    if method is None:
        return None

    def thin(tensor: torch.Tensor, seed: tuple[int, ...]) -> torch.Tensor:
        # A digest, because torch's generator wants one number and neighbouring seeds should differ in many bits.
        digest = hashlib.blake2b(repr(seed).encode(), digest_size=7).digest()
        generator = torch.Generator(device=tensor.device).manual_seed(int.from_bytes(digest))
        return sparsify(tensor, config.density, method, generator)

    return thin


def _in_order(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the terms, added in their order."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def _divisor(weight: float) -> float:
    return weight if abs(weight) >= _TINY else 1.0
