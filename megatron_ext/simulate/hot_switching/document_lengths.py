# SPDX-License-Identifier: Apache-2.0
"""What a simulated run with hot switching trains: how long documents are, and how many make a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from megatron_ext.simulate.number_rules import SEED, NumberRule, number_problems

__all__ = ["SimulatedDocuments", "log_normal_lengths"]

_DOCUMENTS = 100_000
"""Of an assumed corpus."""

_LONGEST_MEAN = 100_000
"""Tokens. Beyond it, an assumed corpus has more sequences than can be put into an order."""

_STEPS = NumberRule(least=1, most=100_000)
"""Of a run."""

_SEQUENCES = NumberRule(least=1, most=50_000)
"""Of a step, whose packing takes half a minute then."""

_ALL_SEQUENCES = 1_000_000
"""Of a run."""

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
        rules = {
            "steps": _STEPS,
            "global_batch_size": _SEQUENCES,
            "mean_length": NumberRule(least=2, most=_LONGEST_MEAN, or_zero=True),
            "length_spread": NumberRule(least=0, most=_WIDEST_SPREAD),
            "seed": SEED,
        }
        found = number_problems(self, rules)
        if not found and self.steps * self.global_batch_size > _ALL_SEQUENCES:
            found.append(
                f"--steps {self.steps} of --global-batch-size {self.global_batch_size} have more than "
                f"{_ALL_SEQUENCES} sequences in all, which take too long to pack; lower one of them"
            )
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
