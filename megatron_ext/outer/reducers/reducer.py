# SPDX-License-Identifier: Apache-2.0
"""What a reducer is: a function of all workers' pseudo-gradients of the same elements, called by the elements' owner.

Sign consensus and normalisation therefore cost no further exchange. Which elements come together in a call depends on
how a model is cut and on how much memory there is, so each is reduced by itself, whatever stands beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron_ext.outer.places import Where

__all__ = ["OPTIONS", "Reducer", "Sparsifier", "TermOf"]

OPTIONS = ("consensus_method", "sparsification_method", "normalize", "density", "int8_mask")
"""Fields of `GTAConfig` that a reducer may be made with."""



@dataclass(frozen=True, kw_only=True)
class TermOf:
    """Whose pseudo-gradient something is, of what and when.

    Random numbers are drawn from it, so that they are the same in a job and at a server.
    """

    round: int
    """Its number, from 1."""

    tensor: str
    """Its name."""

    first: int
    """The first element of the tensor, in row-major order of what a rank holds of it."""

    worker: int
    """Which worker's, or peer's."""


Sparsifier = Callable[[torch.Tensor, TermOf], torch.Tensor]
"""`sparsifier(values, of)`: the values with only a part of their elements."""


class Reducer(ABC):
    """Makes one pseudo-gradient of several. It has no state: what it makes depends on terms and weights alone."""

    name: ClassVar[str]
    """What it is called where it is asked for."""

    options: ClassVar[tuple[str, ...]] = ()
    """Those of `OPTIONS` that mean something with it; it is made with them, by their names, or without."""

    refused_in: ClassVar[Mapping[Where, str]] = {Where.ASYNCHRONOUS: "no two contributions meet there"}
    """The places where it does not work, each with the reason."""

    in_pairs: ClassVar[bool] = False
    """Whether only two workers' pseudo-gradients meet, so that every worker has an anchor of its own."""

    @property
    def is_mean(self) -> bool:
        """Whether it is the weighted mean, bit for bit, of which rounds may then make the values' mean."""
        return False

    @property
    def streams(self) -> bool:
        """Whether a term is used up before the next one is asked for, so that all but the first may share memory."""
        return False

    @property
    def sparsifier(self) -> Sparsifier | None:
        """What thins out every worker's pseudo-gradient of a tensor before they are reduced; None for nothing."""
        return None

    @abstractmethod
    def __call__(self, terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return the common pseudo-gradient.

        Args:
            terms: the accepted workers' pseudo-gradients, fp32 of one shape, in worker order, at least one; they may
                be used up, and the result may be in the memory of the first.
            weights: one per term, 0 or more.
        """
