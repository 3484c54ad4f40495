# SPDX-License-Identifier: Apache-2.0
"""Workers that are left out round after round, of which the user should know, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.phrases import listed, plural

__all__ = ["LASTING_ROUNDS", "LastingRejection", "LastingRejections", "lasting_remarks"]

LASTING_ROUNDS = 10
"""Rounds running in which a worker was left out of a unit, after which it is said; and after 2, 4, 8... times those."""


@dataclass(frozen=True, kw_only=True)
class LastingRejection:
    """A worker that has been left out of a unit in many rounds running."""

    rounds: int
    """How many they are."""

    norm: float
    """Norm of its pseudo-gradient in the last of them."""

    others: float | None
    """Median of the others' norms that were finite; None without any."""

    way_out: str
    """What to do when nothing is wrong with it."""


class LastingRejections:
    """Counts, for every worker and unit, the rounds running in which it was left out."""

    def __init__(self, workers: int, units: int, way_out: str) -> None:
        """Start without experience.

        Args:
            workers: number of workers.
            units: number of units.
            way_out: what to do when nothing is wrong with a worker, in the imperative.
        """
        self._running = torch.zeros(workers, units, dtype=torch.int64)
        self._way_out = way_out

    def take(
        self, norms: torch.Tensor, accepted: torch.Tensor, took_part: torch.Tensor, fresh: torch.Tensor
    ) -> list[tuple[int, int, LastingRejection]]:
        """Take in a round; return whom the user should know of: (worker, unit, what).

        All units come together, when the one that has lasted longest gives reason to, so that it is a line per worker.

        Args:
            norms: fp64, (workers, units).
            accepted: bool, of the same shape.
            took_part: bool, of the same shape; who did not is as before.
            fresh: bool, of the same shape: whose norms are of this round, and not of their last one.
        """
        self._running = torch.where(fresh, torch.where(accepted, 0, self._running + took_part), self._running)
        longest = (self._running * (took_part & fresh & ~accepted)).amax(dim=1).tolist()
        due = [worker for worker, rounds in enumerate(longest) if _is_said(rounds)]
        return [
            (worker, unit, self._found(worker, unit, norms, took_part))
            for worker in due
            for unit in (self._running[worker] >= LASTING_ROUNDS).nonzero().view(-1).tolist()
        ]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return {"running": self._running.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over a saved state; without one, as earlier releases left none, restart counting."""
        if "running" in state:
            saved = torch.as_tensor(state["running"])
            self._running = saved[torch.arange(len(self._running)) % len(saved)].clone()

    def _found(self, worker: int, unit: int, norms: torch.Tensor, took_part: torch.Tensor) -> LastingRejection:
        is_other = took_part[:, unit] & torch.isfinite(norms[:, unit])
        is_other[worker] = False
        others = norms[is_other, unit]
        return LastingRejection(
            rounds=int(self._running[worker, unit]),
            norm=float(norms[worker, unit]),
            others=float(others.quantile(0.5)) if len(others) else None,
            way_out=self._way_out,
        )


def _is_said(rounds: int) -> bool:
    times, rest = divmod(rounds, LASTING_ROUNDS)
    return times > 0 and rest == 0 and times & (times - 1) == 0


def lasting_remarks(
    by_unit: Mapping[str, Mapping[int, LastingRejection]], name: Callable[[int], str]
) -> dict[int, str]:
    """Return by worker a sentence with the way out.

    Args:
        by_unit: by unit and worker, what there is to say.
        name: what a worker is called.
    """
    by_worker: dict[int, dict[str, LastingRejection]] = {}
    for unit, found in by_unit.items():
        for worker, rejection in found.items():
            by_worker.setdefault(worker, {})[unit] = rejection
    said = {}
    for worker, units in sorted(by_worker.items()):
        first, longest = max(units.items(), key=lambda entry: entry[1].rounds)
        others = "" if longest.others is None else f", the median of the others' {longest.others:.4g}"
        said[worker] = (
            f"{name(worker)} has been left out for {longest.rounds} rounds running, now of "
            f"{plural(len(units), 'unit')} ({listed(list(units))}); in {first} its norm is {longest.norm:.4g}{others}: "
            f"look at its data, its learning rate and its hardware; if all is well with it, {longest.way_out}"
        )
    return said
