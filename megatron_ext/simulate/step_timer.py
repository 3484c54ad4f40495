# SPDX-License-Identifier: Apache-2.0
"""How long steps of workers take: lasting speeds, and jitter from step to step, by a seed.

A step of worker w takes s_w times a gamma variable of mean 1 and of the given standard deviation c, so that the sum of
k steps, s_w Gamma(k / c^2, c^2), is drawn at once and exactly.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from megatron_ext.simulate.fleet import SimulatedFleet

__all__ = ["MARGIN", "Seconds", "StepTimer"]

MARGIN = 5.0
"""Standard deviations by which the steps that surely fit into a time stay below it; the others are drawn one by one."""

Seconds = NDArray[np.float64]
"""By worker, or by kind of worker where those of one kind do the same."""

_DIRECT = 1 << 20
"""Draws for maxima of several workers; more steps than that allows are a sum of so many that it is normal."""


class StepTimer:
    """Draws the times of workers' steps.

    Attributes:
        counts: how many workers there are of each kind; all are of another kind where steps vary.
        own: mean seconds of a step, by kind.
    """

    def __init__(self, fleet: SimulatedFleet, step_seconds: float, *, each: bool = False) -> None:
        """Draw the workers' lasting speeds.

        Args:
            fleet: spreads and seed.
            step_seconds: of a worker of average speed.
            each: whether every worker is a kind of its own in any case.
        """
        self._random = np.random.default_rng([fleet.seed, 0])
        factors = np.ones(fleet.workers)
        if fleet.speed_spread:
            factors = self._gamma(np.ones(fleet.workers), fleet.speed_spread)
        # Spread over the sites, as slow machines are.
        factors[np.linspace(0, fleet.workers, fleet.slow_workers, endpoint=False, dtype=int)] *= fleet.slow_factor
        self.counts = np.ones(fleet.workers)
        if not fleet.jitter and not each:
            factors, counts = np.unique(factors, return_counts=True)
            self.counts = counts.astype(float)
        self.own: Seconds = factors * step_seconds
        self._jitter = fleet.jitter
        self._maxima: tuple[float, float] | None = None

    def _gamma(self, means: Seconds, spread: float) -> Seconds:
        return np.asarray(self._random.gamma(1 / spread**2, spread**2, len(means)) * means, dtype=np.float64)

    def run_seconds(self, steps: int) -> float:
        """Return the seconds in which all workers together make `steps` steps per worker, each at its own speed."""
        return float(self.counts.sum() / (self.counts / self.own).sum()) * steps

    def steps(self, count: int | NDArray[np.int64]) -> Seconds:
        """Return how long every worker takes for a number of steps of its own, 0 for none."""
        if not self._jitter:
            return self.own * count
        shape = np.maximum(count, 1) / self._jitter**2
        drawn = self._random.gamma(shape, self._jitter**2, len(self.own)) * self.own
        return np.where(np.asarray(count) > 0, drawn, 0.0)

    def of_one(self, kind: int, count: int) -> float:
        """Return how long one worker takes for a number of steps."""
        if not self._jitter or not count:
            return float(self.own[kind]) * count
        return float(self._random.gamma(count / self._jitter**2, self._jitter**2) * self.own[kind])

    def until(self, kind: int, seconds: float) -> tuple[int, float]:
        """Return how many steps one worker has made when one ends after this time, and how long they take."""
        expected = seconds / float(self.own[kind])
        made = max(math.floor(expected - MARGIN * self._jitter * math.sqrt(expected)) - 1, 0)
        spent = self.of_one(kind, made)
        while spent < seconds:
            made += 1
            spent += self.of_one(kind, 1)
        return made, spent

    def together(self, count: int) -> float:
        """Return how long `count` steps take for each of which all workers wait for the slowest."""
        if not self._jitter:
            return float(self.own.max()) * count
        rows = max(_DIRECT // len(self.own), 64)
        if count <= rows:
            return float(self._slowest(count).sum())
        if self._maxima is None:
            slowest = self._slowest(rows)
            self._maxima = float(slowest.mean()), float(slowest.std())
        mean, deviation = self._maxima
        return max(float(self._random.normal(mean * count, deviation * count**0.5)), 0.0)

    def _slowest(self, rows: int) -> Seconds:
        spread = self._jitter**2
        drawn = self._random.gamma(1 / spread, spread, (rows, len(self.own)))
        return np.asarray((drawn * self.own).max(axis=1), dtype=np.float64)
