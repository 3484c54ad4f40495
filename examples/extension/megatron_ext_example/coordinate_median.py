# SPDX-License-Identifier: Apache-2.0
"""A reducer: the median over the workers, element by element, which no single worker can drag away."""

from collections.abc import Iterable, Sequence

import torch

from megatron_ext.outer.reducers.reducer import Reducer


class CoordinateMedian(Reducer):
    """The weighted median: half of the weight is on either side of it.

    Where two values are in the middle, it is the one nearer to zero: of two workers the more careful one counts.
    """

    name = "median"

    def __call__(self, terms: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """Return the median of every element."""
        ordered, places = torch.stack(list(terms)).sort(dim=0, stable=True)
        passed = torch.tensor(weights, dtype=torch.float64, device=ordered.device)[places].cumsum(dim=0)
        half = passed[-1] / 2
        lower = ordered.gather(0, (passed < half).sum(dim=0, keepdim=True))[0]
        upper = ordered.gather(0, (passed <= half).sum(dim=0, keepdim=True).clamp(max=len(ordered) - 1))[0]
        return torch.where(lower.abs() <= upper.abs(), lower, upper)
