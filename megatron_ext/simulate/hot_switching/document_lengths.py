# SPDX-License-Identifier: Apache-2.0
"""What a simulated run with hot switching trains: how long documents are, and how many make a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

__all__ = ["SimulatedDocuments", "log_normal_lengths"]

_DOCUMENTS = 100_000
"""Of an assumed corpus."""

_LONGEST_MEAN = 100_000
"""Tokens. Beyond it, an assumed corpus has more sequences than can be put into an order."""

_WIDEST_SPREAD = 2.0
"""With a wider one, documents that are too rare to be among the assumed ones have much of the tokens: 4 % of them at 3,
and more than half at 5, by which the mean would be less than what was asked for."""


@dataclass(frozen=True, kw_only=True)
class SimulatedDocuments:
    """Batches of documents, and their lengths where no corpus tells them."""

    steps: int = 10
    """Steps, each with a batch of its own"""

    global_batch_size: int = 512
    """Sequences of a step, as for a run"""

    mean_length: float = 0.0
    """In place of --lengths: tokens of a document in the mean, of lengths that are assumed to be log-normal"""

    length_spread: float = 0.0
    """With --mean-length: standard deviation of the logarithm of the lengths, at most 2"""

    seed: int = 0
    """Of the order of documents"""

    def problems(self, *, measured: bool) -> list[str]:
        """Return what cannot be, one sentence each.

        Args:
            measured: whether a corpus tells the lengths.
        """
        rules = (
            ("steps", self.steps >= 1, "at least 1"),
            ("global-batch-size", self.global_batch_size >= 1, "at least 1"),
            ("mean-length", self.mean_length == 0 or 2 <= self.mean_length <= _LONGEST_MEAN, f"2 to {_LONGEST_MEAN}"),
            ("length-spread", 0 <= self.length_spread <= _WIDEST_SPREAD, f"0 to {_WIDEST_SPREAD:g}"),
            ("seed", self.seed >= 0, "0 or more"),
        )
        found = [
            f"--{flag} is {getattr(self, flag.replace('-', '_')):g}; give a number {rule}"
            for flag, fits, rule in rules
            if not fits
        ]
        if not found and measured == (self.mean_length > 0):
            found.append("give either --lengths or --mean-length")
        if not found and measured and self.length_spread:
            found.append("--length-spread has no effect with --lengths; drop it")
        return found


def log_normal_lengths(mean: float, spread: float) -> npt.NDArray[np.int64]:
    """Return tokens of documents whose lengths are log-normal: quantiles, ascending.

    Args:
        mean: of the lengths.
        spread: standard deviation of their logarithm.
    """
    median = mean / math.exp(spread**2 / 2)
    places = (np.arange(_DOCUMENTS) + 0.5) / _DOCUMENTS
    normal = NormalDist()
    lengths = [round(median * math.exp(spread * normal.inv_cdf(place))) for place in places.tolist()]
    return np.array(lengths, dtype=np.int64)
