# SPDX-License-Identifier: Apache-2.0
"""Telling which workers' pseudo-gradients are anomalous, from how large they have been (EDiT, arXiv 2412.07210).

One detector follows the norms of every worker and every unit: exponentially weighted mean and variance, and how
widely the latest deviations have scattered. Only norms that are too large are anomalous; those that are non-finite
always are. It learns from accepted norms only, so that an anomaly cannot make the next one look normal.

Norms fall with the learning rate, often faster than a moving mean forgets, which hides who strays late in a run. So it
can follow, in place of a norm, its quotient by the median over the workers of the round, which is 1 for everybody
however large or small all of them are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.outer.shared_level import SharedLevels

__all__ = ["AnomalyDetector", "NewLevel"]

_TENSORS = ("mean", "spread", "weight", "weight_of_squares", "count", "window")


_RESOLUTION = 1e-6
"""Of norms, relative: they are sums in fp32. What has differed by less was constant, and does not say what is far."""


@dataclass(frozen=True, kw_only=True)
class NewLevel:
    """A level of a worker's norms from which the detector starts again; of quotients where it follows these."""

    worker: int
    """Whose."""

    unit: int
    """Of which unit."""

    before: float
    """The mean that rejected it."""

    now: float
    """The mean of the latest norms."""


class AnomalyDetector:
    """Detects outliers among norms, for every worker and unit by itself. All arithmetic is in fp64."""

    def __init__(
        self,
        workers: int,
        units: int,
        *,
        alpha: float,
        warmup: int,
        threshold: float,
        bias_correction: bool = True,
        relative: bool = False,
        relearn: int = 0,
    ) -> None:
        """Start without experience.

        Args:
            workers: number of workers.
            units: number of units.
            alpha: weight of the newest norm, in (0, 1).
            warmup: accepted norms before anything finite is flagged, and length of the window of deviations;
                at least 2.
            threshold: standard deviations above the mean at which a norm is anomalous; above 0.
            bias_correction: estimate mean and variance from the norms seen so far alone. Without it they start at
                zero, as in the official implementation, whose 'standard deviation' is start-up bias for a long while.
            relative: follow norms divided by their median over the workers, of which there must be at least three: of
                two, neither is the measure.
            relearn: rounds in which a norm that most workers share is rejected, after which it is a new level; 0 for
                never, as in the official implementation.
        """
        shape = (workers, units)
        self.alpha = alpha
        self.warmup = warmup
        self.threshold = threshold
        self.bias_correction = bias_correction
        self.relative = relative
        self._scale = torch.ones(units, dtype=torch.float64)
        """By what the norms of every unit were divided in the last round; 1 unless `relative`."""
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.spread = torch.zeros(shape, dtype=torch.float64)
        self.weight = torch.zeros(shape, dtype=torch.float64)
        self.weight_of_squares = torch.zeros(shape, dtype=torch.float64)
        self.count = torch.zeros(shape, dtype=torch.int64)
        self.window = torch.zeros((warmup, *shape), dtype=torch.float64)
        self._levels = SharedLevels(relearn, workers, units) if relearn else None

    def verdicts(self, norms: torch.Tensor) -> torch.Tensor:
        """Return which norms are anomalous.

        Args:
            norms: fp64, (workers, units).

        Returns:
            bool, (workers, units).
        """
        if self.relative:
            self._scale = _median(norms, norms > 0)
        norms = norms / self._scale
        limit = self.threshold * self._scatter().clamp(min=1.0)
        return ~torch.isfinite(norms) | (self._deviation(norms) > limit)

    def reason(self, worker: int, unit: int, norm: float) -> str:
        """Say why a norm of the last round is anomalous; it has not been learned from.

        Args:
            worker: whose norm.
            unit: of which unit.
            norm: that `verdicts` calls anomalous.
        """
        if not math.isfinite(norm):
            return f"the norm of its pseudo-gradient is {norm}"
        at = (worker, unit)
        norms = self.mean.clone()
        norms[at] = norm = norm / float(self._scale[unit])
        limit = float(self.threshold * self._scatter().clamp(min=1.0)[at])
        what = "the norm of its pseudo-gradient" + (", divided by the median of all," if self.relative else "")
        return (
            f"{what} is {norm:.4g}, {float(self._deviation(norms)[at]):.3g} standard "
            f"deviations above its mean of {float(self.mean[at]):.4g}; the limit is {limit:.3g}"
        )

    def learn(
        self,
        norms: torch.Tensor,
        accepted: torch.Tensor,
        present: torch.Tensor | None = None,
        fresh: torch.Tensor | None = None,
    ) -> list[NewLevel]:
        """Take in the norms that were accepted; `verdicts` has seen them.

        Args:
            norms: fp64, (workers, units).
            accepted: bool, of the same shape; the other norms change nothing, until they are a new level.
            present: bool, of the same shape: who took part; all unless given.
            fresh: bool, of the same shape: whose norms are of this round. The others' are those of their last one,
                with which these are compared; nothing is learned from them again. All unless given.

        Returns:
            The new levels, from which the next round is judged.
        """
        present = torch.ones_like(accepted) if present is None else present
        fresh = torch.ones_like(accepted) if fresh is None else fresh
        compared, limits, means = norms / self._scale, self._limits(), self.mean
        self._learn(norms, accepted, fresh)
        if self._levels is None:
            return []
        measure = torch.isfinite(norms) & (norms > 0) & present
        new = self._levels.take(compared, rejected=~accepted, present=measure, fresh=fresh, limits=limits, means=means)
        return self._start_again(new) if new.any() else []

    def _learn(self, norms: torch.Tensor, accepted: torch.Tensor, fresh: torch.Tensor) -> None:
        if self.relative:
            # What was rejected is not a measure for the others, and a single worker has nothing to be compared with.
            measure = accepted & (norms > 0)
            norms = norms / _median(norms, measure)
            accepted = accepted & (measure.sum(dim=0) > 1)
        accepted = accepted & fresh
        norms = torch.where(accepted, norms, self.mean)
        alpha = self.alpha
        weight = (1 - alpha) * self.weight + alpha
        gain = alpha / weight if self.bias_correction else torch.full_like(weight, alpha)
        before = norms - self.mean
        mean = self.mean + gain * before
        if self.bias_correction:
            spread = (1 - alpha) * self.spread + alpha * before * (norms - mean)
        else:
            spread = (1 - alpha) * (self.spread + alpha * before * (norms - mean))
        squares = (1 - alpha) ** 2 * self.weight_of_squares + alpha**2
        for name, value in (
            ("mean", mean),
            ("spread", spread),
            ("weight", weight),
            ("weight_of_squares", squares),
            ("count", self.count + 1),
        ):
            setattr(self, name, torch.where(accepted, value, getattr(self, name)))
        place = (self.count - 1).clamp(min=0) % self.warmup
        newest = torch.where(accepted, self._deviation(norms), self.window.gather(0, place[None])[0])
        self.window.scatter_(0, place[None], newest[None])

    def state(self) -> dict[str, Any]:
        """Return everything learned, for a checkpoint; `load` takes it."""
        found = {name: getattr(self, name).clone() for name in _TENSORS}
        if self._levels is not None:
            found.update(self._levels.state())
        return {**found, "relative": torch.ones(1, dtype=torch.int64)} if self.relative else found

    def load(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Worker i continues from the experience of worker i mod the saved number of workers.

        Raises:
            UserError: it was saved with another length of the window, for other units, or has followed something else.
        """
        if ("relative" in state) != self.relative:
            followed, way = ("norms", "without") if self.relative else ("norms divided by their median", "with")
            raise UserError(
                f"the saved anomaly detector has followed {followed}; resume {way} ewma_relative "
                "(--local-sgd-ewma-relative), or start without its experience"
            )
        saved = {name: torch.as_tensor(state[name]) for name in _TENSORS}
        if saved["window"].shape[0] != self.warmup or saved["mean"].shape[1] != self.mean.shape[1]:
            raise UserError(
                f"the checkpoint's anomaly detector has {saved['window'].shape[0]} warm-up rounds and "
                f"{saved['mean'].shape[1]} units, this run's {self.warmup} and {self.mean.shape[1]}; resume with "
                f"--local-sgd-ewma-warmup-steps {saved['window'].shape[0]}, or start without its experience "
                "(--no-load-optim, from a sync point)"
            )
        workers = torch.arange(self.mean.shape[0]) % saved["mean"].shape[0]
        for name, value in saved.items():
            setattr(self, name, value.index_select(value.dim() - 2, workers).clone())
        if self._levels is not None:
            self._levels.load(state, workers)

    def _start_again(self, new: torch.Tensor) -> list[NewLevel]:
        """Restart mean and variance from the latest norms, where there is a new level; no worker is warmed up again.

        A few norms may be close to each other by chance, so that their scatter is at least what it was, in relation to
        the level. As little weight as so few have makes the mean follow a level that is still rising.
        """
        assert self._levels is not None
        level, scattered = self._levels.level()
        variance = torch.maximum(scattered, self._variance() * (level / self.mean).square())
        # The mean of so few is itself uncertain.
        variance = variance * (1 + 1 / self._levels.rounds)
        # One alone would have no scatter around its own mean.
        weights = [self.alpha * (1 - self.alpha) ** age for age in range(max(self._levels.rounds, 2))]
        fresh = torch.tensor(weights, dtype=torch.float64)
        before = self.mean
        self.mean = torch.where(new, level, self.mean)
        self.weight = torch.where(new, fresh.sum(), self.weight)
        self.weight_of_squares = torch.where(new, fresh.square().sum(), self.weight_of_squares)
        spread = variance * self.weight * self._freedom() if self.bias_correction else variance
        self.spread = torch.where(new, spread, self.spread)
        return [
            NewLevel(worker=worker, unit=unit, before=float(before[worker, unit]), now=float(level[worker, unit]))
            for worker, unit in new.nonzero().tolist()
        ]

    def _freedom(self) -> torch.Tensor:
        """Return by what a weighted sample's variance is too small: 1 - 1/n for n equal weights."""
        return 1 - self.weight_of_squares / self.weight.square()

    def _variance(self) -> torch.Tensor:
        # Of weights that sum up to 1: the unbiased variance of a sample with unequal weights.
        return self.spread / self.weight / self._freedom() if self.bias_correction else self.spread

    def _std(self) -> torch.Tensor:
        """Return the standard deviations; NaN where too little is known."""
        std = self._variance().clamp(min=0).sqrt()
        known = (self.count >= max(self.warmup, 2)) & (std > _RESOLUTION * self.mean.abs())
        return torch.where(known, std, math.nan)

    def _limits(self) -> torch.Tensor:
        """Return up to where norms are accepted; NaN where too little is known."""
        return self.mean + self.threshold * self._scatter().clamp(min=1.0) * self._std()

    def _deviation(self, norms: torch.Tensor) -> torch.Tensor:
        """Return how many standard deviations norms lie above the mean; 0 where too little is known."""
        std = self._std()
        return torch.where(std.isnan(), torch.zeros_like(norms), (norms - self.mean) / std)

    def _scatter(self) -> torch.Tensor:
        """Return the standard deviation of the latest deviations; 1 where too little is known."""
        return torch.where(self.count >= self.warmup, self.window.std(dim=0), torch.ones_like(self.mean))


def _median(norms: torch.Tensor, measure: torch.Tensor) -> torch.Tensor:
    """Return each unit's median over the workers that are a measure for the others; 1 where none is."""
    present = torch.where(torch.isfinite(norms) & measure, norms, math.nan)
    return present.nanquantile(0.5, dim=0).nan_to_num(nan=1.0)
