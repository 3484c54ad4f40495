# SPDX-License-Identifier: Apache-2.0
"""The pseudo-gradient penalty of EDiT (arXiv 2412.07210): which workers count in a round, how much, and how far.

Everything is decided per unit from the norms of all workers' pseudo-gradients, each taken over all shards of the
worker, in this order: anomalous workers are excluded, the rest weighted, and their common pseudo-gradient clipped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_ext.outer.detector import AnomalyDetector
from megatron_ext.outer.lasting import LastingRejection, LastingRejections
from megatron_ext.outer.penalty_config import PenaltyConfig

__all__ = ["Penalty", "Verdict", "clip_coefficient"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was decided for one unit."""

    accepted: tuple[int, ...]
    """The workers that count, in order; empty when the unit goes back to its anchor."""

    weights: tuple[float, ...]
    """Their weights, which sum up to 1."""

    reasons: dict[int, str] = field(default_factory=dict)
    """Why the detector has left a worker out, for those that it has."""

    new_levels: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The workers whose norms have a new level from the next round on: the mean that rejected it, and the new one."""

    lasting: dict[int, LastingRejection] = field(default_factory=dict)
    """The workers that have been left out in many rounds running, whenever there is reason to say so."""

    log_weights: tuple[float, ...] = ()
    """Natural logarithms of the weights, also of those that are nothing in fp64; empty where all weights are equal."""

    norms: tuple[float, ...] = ()
    """Their norms where the mean of these is the scale of the weights; empty elsewhere."""

    def relative_weight(self, worker: int) -> float:
        """Return a worker's weight over the mean weight; 0 where it does not count."""
        if worker not in self.accepted:
            return 0.0
        is_plain = not self.log_weights  # so that it is 1 to the last bit
        return 1.0 if is_plain else self.weights[self.accepted.index(worker)] * len(self.accepted)

    def part_of(self, worker: int, workers: Collection[int]) -> float:
        """Return which part of their mean among some workers is one's that counts.

        Args:
            worker: whose.
            workers: of whom; those that do not count have none.
        """
        found = self.among(workers)
        return found.weights[found.accepted.index(worker)] / math.fsum(found.weights)

    def joined_by(self, workers: Collection[int]) -> Verdict:
        """Return the verdict with further workers, each of which weighs as much as those that count do on average."""
        count, more = len(self.accepted), len(workers)
        if not (count and more):
            return self
        rest = count / (count + more)
        order = sorted([*zip(self.accepted, range(count), strict=True), *((worker, count) for worker in workers)])
        weights = [*(weight * rest for weight in self.weights), 1 / (count + more)]
        logs = [*(log + math.log(rest) for log in self.log_weights), -math.log(count + more)]
        norms = [*self.norms, math.fsum(self.norms) / count]
        places = [place for _, place in order]
        return replace(
            self,
            accepted=tuple(worker for worker, _ in order),
            weights=tuple(weights[place] for place in places),
            log_weights=tuple(logs[place] for place in places) if self.log_weights else (),
            norms=tuple(norms[place] for place in places) if self.norms else (),
        )

    def among(self, workers: Collection[int]) -> Verdict:
        """Return the verdict on what some workers alone have: its weights are relative to the largest of theirs.

        Beside others the weights of all of them may be nothing, which says nothing about them among themselves.

        Args:
            workers: who has it.
        """
        places = [place for place, worker in enumerate(self.accepted) if worker in workers]
        accepted = tuple(self.accepted[place] for place in places)
        logs = tuple(self.log_weights[place] for place in places) if self.log_weights else ()
        norms = tuple(self.norms[place] for place in places) if self.norms else ()
        if logs and norms:
            # The scale is that of those who have it.
            mean, own = sum(self.norms) / len(self.norms), sum(norms) / len(norms)
            logs = tuple(log * mean / own if own > 0 else 0.0 for log in logs)
        weights = tuple(math.exp(log - max(logs)) for log in logs) if logs else (1.0,) * len(accepted)
        return Verdict(accepted=accepted, weights=weights, log_weights=logs, norms=norms)


class Penalty:
    """Decides over the workers of every round. The same on all ranks, given the same norms."""

    def __init__(self, config: PenaltyConfig, *, workers: int, units: int) -> None:
        self._config = config
        self._detector: AnomalyDetector | None = None
        self._lasting = LastingRejections(workers, units, _way_out(config))
        if config.skip_anomaly:
            self._detector = AnomalyDetector(
                workers,
                units,
                alpha=config.ewma_alpha,
                warmup=config.ewma_warmup_steps,
                threshold=config.ewma_threshold,
                bias_correction=not config.ewma_official_start,
                relative=config.ewma_relative,
                relearn=config.ewma_relearn_rounds,
            )

    @property
    def tolerates_non_finite_workers(self) -> bool:
        """Whether a worker with non-finite weights is excluded instead of ending the run."""
        return self._detector is not None

    def decide(
        self, norms: torch.Tensor, steps: Sequence[float] | None = None, fresh: Collection[int] | None = None
    ) -> list[Verdict]:
        """Decide over a round, and learn from what was accepted.

        Args:
            norms: L2 norms of the pseudo-gradients, fp64, (workers, units), on the CPU.
            steps: how many every worker has made since the last round, where they differ. One that has made none
                brings nothing, and does not count.
            fresh: the workers whose norms are of this round, where the others' are those of their last one, as if all
                had come together: they are what these are compared with. All unless given.

        Returns:
            One verdict per unit.
        """
        made = torch.ones(len(norms)) if steps is None else torch.tensor(steps, dtype=torch.float64)
        took_part = (made > 0).unsqueeze(1).expand_as(norms)
        accepted = took_part if self._detector is None else took_part & ~self._detector.verdicts(norms)
        verdicts = [self._verdict(norms[:, unit], accepted[:, unit], made) for unit in range(norms.shape[1])]
        is_fresh = torch.tensor([fresh is None or worker in fresh for worker in range(len(norms))])
        of_round = is_fresh.unsqueeze(1).expand_as(norms)
        if self._detector is not None:
            # In the words of what has decided, which a new level is about to replace.
            for worker, unit in (took_part & of_round & ~accepted).nonzero().tolist():
                verdicts[unit].reasons[worker] = self.reason(worker, unit, float(norms[worker, unit]))
            for level in self._detector.learn(norms, accepted, took_part, of_round):
                verdicts[level.unit].new_levels[level.worker] = (level.before, level.now)
            for worker, unit, found in self._lasting.take(norms, accepted, took_part, of_round):
                verdicts[unit].lasting[worker] = found
        return verdicts

    def reason(self, worker: int, unit: int, norm: float) -> str:
        """Say why the last round has left a worker out of a unit, given the norm of its pseudo-gradient there."""
        assert self._detector is not None, "without a detector no worker is left out"
        return self._detector.reason(worker, unit, norm)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return {} if self._detector is None else {"detector": {**self._detector.state(), **self._lasting.state()}}

    def load(self, state: dict[str, Any]) -> None:
        """Take over a saved state; without one, start without experience."""
        if self._detector is not None and "detector" in state:
            self._detector.load(state["detector"])
            self._lasting.load(state["detector"])

    def _verdict(self, norms: torch.Tensor, accepted: torch.Tensor, steps: torch.Tensor) -> Verdict:
        workers = accepted.nonzero().view(-1).tolist()
        if not workers:
            return Verdict(accepted=(), weights=())
        weights = torch.full((len(workers),), 1 / len(workers), dtype=torch.float64)
        log_weights: tuple[float, ...] = ()
        means: tuple[float, ...] = ()
        if self._config.pseudo_gradnorm_reduce:
            scale = self._temperature
            if self._config.weight_scale_free:
                scale *= float(norms[workers].mean())
                means = tuple(norms[workers].tolist())
            if scale > 0:
                weights = torch.softmax(-norms[workers] / scale, dim=0)
                log_weights = tuple(torch.log_softmax(-norms[workers] / scale, dim=0).tolist())
        ratio = self._config.step_weight_ratio if self._config.pseudo_gradnorm_reduce else 1.0
        if self._config.use_step_weight and ratio > 0:
            by_steps = steps[workers] / steps[workers].sum()
            weights = (1 - ratio) * weights + ratio * by_steps
            log_weights, means = tuple(weights.log().tolist()), ()
        return Verdict(
            accepted=tuple(workers), weights=tuple(weights.tolist()), log_weights=log_weights, norms=means
        )

    @property
    def _temperature(self) -> float:
        temperature = self._config.weight_softmax_temperature
        return 1.0 if temperature is None else temperature


def _way_out(config: PenaltyConfig) -> str:
    if config.ewma_relearn_rounds:
        return "raise --local-sgd-ewma-threshold, or drop --local-sgd-skip-anomaly"
    return "let a level that most workers share be learned, with --local-sgd-ewma-relearn-rounds above 0"


def clip_coefficient(norm: float, limit: float | None) -> float:
    """Return by what to multiply a pseudo-gradient of this norm so that it does not exceed `limit`."""
    if limit is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
