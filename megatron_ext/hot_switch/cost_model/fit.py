# SPDX-License-Identifier: Apache-2.0
"""From measured times of rows to the coefficients of `step_time.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.cost_model.step_time import Coefficients

__all__ = ["fit_coefficients"]


def fit_coefficients(lengths: Sequence[int], seconds: Sequence[float]) -> Coefficients:
    """Return the a, b, c of t = a s^2 + b s + c that are next to measured times, none of them negative.

    Errors count relative to the times, so that short rows, of which there are many, are not drowned by long ones. A
    coefficient that would be negative, which noise can do, is 0 instead.

    Args:
        lengths: positions of rows with one document each, at least three different ones.
        seconds: of each, above 0.

    Raises:
        UserError: there are fewer than three lengths.
    """
    if len(set(lengths)) < 3:
        raise UserError(
            f"three coefficients need three different lengths, and there are {len(set(lengths))}; give more"
        )
    positions, times = np.array(lengths, dtype=np.float64), np.array(seconds, dtype=np.float64)
    # In units of the longest row, as squares of large numbers would be hard to tell from one another.
    longest = positions.max()
    columns = np.stack([(positions / longest) ** 2, positions / longest, np.ones_like(positions)], axis=1)
    weighted = columns / times[:, None]
    best, least = np.zeros(3), float("inf")
    for count in (1, 2, 3):
        for kept in combinations(range(3), count):
            found, *_ = np.linalg.lstsq(weighted[:, kept], np.ones_like(times), rcond=None)
            error = float(((weighted[:, kept] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(kept)] = found
    squared, linear, constant = (float(value) for value in best)
    return Coefficients(squared=squared / longest**2, linear=linear / longest, constant=constant)
