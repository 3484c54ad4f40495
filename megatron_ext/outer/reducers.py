# SPDX-License-Identifier: Apache-2.0
"""How the workers' pseudo-gradients become one: weighted means, and generalized task arithmetic.

Every reducer is a function of all workers' pseudo-gradients of the same elements, called by the elements' owner.
Sign consensus and normalisation therefore cost no further exchange.

Generalized task arithmetic (GTA, in EDiT's implementation): every element keeps only the workers whose weighted
pseudo-gradient points where the majority's does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.outer.weighted_sum import relative, weighted_mean, weighted_sum

__all__ = ["Gta", "Linear", "Reducer", "Sparsifier", "build_reducer", "build_sparsifier", "sparsify"]

_TINY = 1e-8
Sparsification = Literal["magnitude", "random", "rescaled_random"]

Sparsifier = Callable[[torch.Tensor, tuple[int | str, ...]], torch.Tensor]
"""`sparsifier(tensor, seed)`: the tensor with only a part of its elements; `seed` names round, tensor and worker."""


class Reducer(Protocol):
    """Makes one pseudo-gradient of several."""

    @property
    def streams(self) -> bool:
        """Whether a term is used up before the next one is asked for, so that all but the first may share memory."""

    def __call__(self, terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return the common pseudo-gradient.

        Args:
            terms: the accepted workers' pseudo-gradients, fp32 of one shape, in worker order, at least one; they may
                be used up, and the result may be in the memory of the first.
            weights: one per term, 0 or more.
        """


@dataclass(frozen=True, kw_only=True)
class Linear:
    """The weighted sum of the pseudo-gradients."""

    normalize: bool = True
    """Divide by the sum of the weights."""

    streams: ClassVar[bool] = True

    def __call__(self, terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return sum_i w_i t_i, divided by sum_i w_i when normalising."""
        return weighted_mean(terms, weights) if self.normalize else weighted_sum(terms, weights)


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

    @property
    def streams(self) -> bool:
        """Whether it is the weighted mean: without a consensus nobody's term waits for the others'."""
        return self.consensus is None

    def __call__(self, terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return sum_i m_i w_i t_i with m_i = [sign of w_i t_i = the majority's], divided by sum_i m_i w_i."""
        if self.consensus is None:
            return Linear(normalize=self.normalize)(terms, weights)
        terms = list(terms)
        weights = relative(weights) if self.normalize else weights
        dtype = torch.int8 if self.int8_mask else torch.float32
        signs = [(term.sign() * (weight > 0)).to(dtype) for term, weight in zip(terms, weights, strict=True)]
        if self.consensus == "sum":
            balance = weighted_sum((term.clone() for term in terms), weights)
        else:
            balance = weighted_sum((sign.to(torch.float32, copy=True) for sign in signs), [1.0] * len(signs))
        majority = torch.where(balance >= 0, 1, -1).to(signs[0].dtype)
        agrees = [sign == majority for sign in signs]
        divisor = weighted_sum((mask.float() for mask in agrees), weights)
        total = weighted_sum((term.mul_(mask) for term, mask in zip(terms, agrees, strict=True)), weights)
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


def build_sparsifier(config: GTAConfig) -> Sparsifier | None:
    """Return what thins out a pseudo-gradient, given the seed of its random numbers; None for nothing."""
    method = config.sparsification_method
    if method is None:
        return None

    def thin(tensor: torch.Tensor, seed: tuple[int | str, ...]) -> torch.Tensor:
        # A digest, because torch's generator wants one number and neighbouring seeds should differ in many bits.
        digest = hashlib.blake2b(repr(seed).encode(), digest_size=7).digest()
        generator = torch.Generator(device=tensor.device).manual_seed(int.from_bytes(digest))
        return sparsify(tensor, config.density, method, generator)

    return thin
