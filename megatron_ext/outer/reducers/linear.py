# SPDX-License-Identifier: Apache-2.0
"""The weighted mean of the pseudo-gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron_ext.outer.places import Where
from megatron_ext.outer.reducers.reducer import Reducer
from megatron_ext.outer.weighted_sum import weighted_mean, weighted_sum

__all__ = ["Linear"]


@dataclass(frozen=True, kw_only=True)
class Linear(Reducer):
    """The weighted sum of the pseudo-gradients."""

    name: ClassVar[str] = "linear"
    options: ClassVar[tuple[str, ...]] = ("normalize",)
    refused_in: ClassVar[Mapping[Where, str]] = {}

    normalize: bool = True
    """Divide by the sum of the weights."""

    @property
    def is_mean(self) -> bool:
        """Whether it divides."""
        return self.normalize

    @property
    def streams(self) -> bool:
        """Always."""
        return True

    def __call__(self, terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return sum_i w_i t_i, divided by sum_i w_i when normalising."""
        return weighted_mean(terms, weights) if self.normalize else weighted_sum(terms, weights)
