# SPDX-License-Identifier: Apache-2.0
"""The penalty over process groups: norms of whole workers, and decisions that are equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.outer.penalty import Penalty, Verdict, clip_coefficient
from megatron_ext.phrases import listed

__all__ = ["Judge"]


class Judge:
    """Decides over a round from squared norms that every rank has of its own part only."""

    def __init__(
        self, penalty: Penalty, units: Sequence[str], *, clip: float | None, across: Any, inside: Any
    ) -> None:
        """Prepare.

        Args:
            penalty: decides from the norms.
            units: the units' names.
            clip: largest norm of a unit's common pseudo-gradient.
            across: process group of the ranks that hold the same values, one per worker, in worker order.
            inside: process group of all ranks of this worker; None when it is this one alone.
        """
        self.penalty = penalty
        self._units = units
        self._clip = clip
        self._across = across
        self._inside = inside

    def add_up(self, squares: torch.Tensor) -> None:
        """Add up fp64 numbers over all owners and all ranks of a worker; the same bits everywhere."""
        dist.all_reduce(squares, group=self._across)
        self.add_up_inside(squares)
        # Workers may have added in another order; what is decided by these numbers must not differ.
        dist.broadcast(squares, group=self._across, group_src=0)

    def add_up_inside(self, squares: torch.Tensor) -> None:
        """Add up fp64 numbers over all ranks of this worker."""
        if self._inside is not None:
            dist.all_reduce(squares, group=self._inside)

    def verdicts(self, squares: torch.Tensor, number: int, steps: Sequence[int] | None = None) -> list[Verdict]:
        """Return a verdict per unit.

        Args:
            squares: what `add_up` made of the workers' squared norms, (workers, units).
            number: of the round.
            steps: as `Penalty.decide` takes them.

        Raises:
            RuntimeError: see `refuse_non_finite`.
        """
        self.refuse_non_finite(squares, number)
        return self.penalty.decide(squares.sqrt().cpu(), steps)

    def coefficients(self, squares: torch.Tensor) -> list[float]:
        """Return by what to multiply each unit's common pseudo-gradient, given its squared norms, (units,)."""
        return [clip_coefficient(norm, self._clip) for norm in squares.sqrt().tolist()]

    def refuse_non_finite(self, squares: torch.Tensor, number: int) -> None:
        """Refuse workers with non-finite weights, unless they are left out.

        Args:
            squares: their squared norms, (workers, units).
            number: of the round.

        Raises:
            RuntimeError: naming them and the units.
        """
        if self.penalty.tolerates_non_finite_workers:
            return
        found = []
        for worker, by_unit in enumerate(squares.tolist()):
            units = [unit for unit, square in zip(self._units, by_unit, strict=True) if not math.isfinite(square)]
            if units:
                found.append(f"worker {worker} had non-finite weights in {listed(units)}")
        if found:
            raise RuntimeError(
                f"outer round {number}: {'; '.join(found)}. The run ends here and saves nothing. Resume from "
                "the last checkpoint, with a lower learning rate or with the cause removed, or with "
                "--local-sgd-skip-anomaly to leave such workers out"
            )
