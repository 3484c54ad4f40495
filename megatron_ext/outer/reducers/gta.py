# SPDX-License-Identifier: Apache-2.0
"""Generalized task arithmetic (GTA, in EDiT's implementation).

Every element keeps only the workers whose weighted pseudo-gradient points where the majority's does; before that, every
worker's pseudo-gradient may be thinned out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import ClassVar, Literal

import torch

from megatron_ext.outer.reducers.linear import Linear
from megatron_ext.outer.reducers.reducer import OPTIONS, Reducer, Sparsifier, TermOf
from megatron_ext.outer.weighted_sum import relative, weighted_sum

__all__ = ["Gta", "sparsify"]

_TINY = 1e-8
Sparsification = Literal["magnitude", "random", "rescaled_random"]


@dataclass(frozen=True, kw_only=True)
class Gta(Reducer):
    """Sums only what points where the majority does."""

    name: ClassVar[str] = "gta"
    options: ClassVar[tuple[str, ...]] = OPTIONS

    consensus_method: Literal["sum", "count"] | None = None
    """What decides an element's sign: the sum of the weighted pseudo-gradients, the number of workers on either side,
    or nothing."""

    normalize: bool = True
    """Divide every element by the weights of the workers that were summed."""

    int8_mask: bool = False
    """Compare signs as 8-bit integers, which takes a quarter of the memory."""

    sparsification_method: Sparsification | None = None
    """How pseudo-gradients are thinned out first; not at all when None."""

    density: float = 1.0
    """Fraction of the elements that this keeps, in (0, 1]."""

    @property
    def streams(self) -> bool:
        """Whether it is the weighted mean: without a consensus nobody's term waits for the others'."""
        return self.consensus_method is None

    @property
    def sparsifier(self) -> Sparsifier | None:
        """What keeps only a part of a pseudo-gradient."""
        method = self.sparsification_method
        if method is None:
            return None

        def thin(tensor: torch.Tensor, of: TermOf) -> torch.Tensor:
            # A digest, because torch's generator wants one number and neighbouring seeds should differ in many bits.
            digest = hashlib.blake2b(repr(astuple(of)).encode(), digest_size=7).digest()
            generator = torch.Generator(device=tensor.device).manual_seed(int.from_bytes(digest))
            return sparsify(tensor, self.density, method, generator)

        return thin

    def __call__(self, terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return sum_i m_i w_i t_i with m_i = [sign of w_i t_i = the majority's], divided by sum_i m_i w_i."""
        if self.consensus_method is None:
            return Linear(normalize=self.normalize)(terms, weights)
        terms = list(terms)
        weights = relative(weights) if self.normalize else weights
        dtype = torch.int8 if self.int8_mask else torch.float32
        signs = [(term.sign() * (weight > 0)).to(dtype) for term, weight in zip(terms, weights, strict=True)]
        if self.consensus_method == "sum":
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
