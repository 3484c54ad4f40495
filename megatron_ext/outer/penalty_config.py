# SPDX-License-Identifier: Apache-2.0
"""Configuration of the penalty: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

import math
from dataclasses import dataclass

from megatron_ext.config_options import FromArgs, flag, flag_of

__all__ = ["PenaltyConfig"]


@dataclass(frozen=True, kw_only=True)
class PenaltyConfig(FromArgs):
    """EDiT's pseudo-gradient penalty (arXiv 2412.07210): which workers count in a round, how much, and how far."""

    skip_anomaly: bool = flag("--local-sgd-skip-anomaly", False)
    """Leave workers whose pseudo-gradient is anomalously large out of a round, unit by unit, and those that are
    non-finite. When all are, the unit goes back to the anchor. Without it, non-finite weights end the run."""

    ewma_alpha: float = flag("--local-sgd-ewma-alpha", 0.02)
    """Weight of the newest norm in the anomaly detector's moving mean and variance."""

    ewma_warmup_steps: int = flag("--local-sgd-ewma-warmup-steps", 120)
    """Rounds, not steps, before the anomaly detector flags anything that is finite."""

    ewma_threshold: float = flag("--local-sgd-ewma-threshold", 3.0)
    """Standard deviations above the mean at which a norm is anomalous."""

    ewma_official_start: bool = flag("--local-sgd-ewma-official-start", False)
    """Start the moving mean and variance at zero without bias correction, as the official implementation does."""

    ewma_relative: bool = flag("--local-sgd-ewma-relative", False)
    """Let the detector follow each worker's norm divided by the median over the workers, so that norms that fall for
    all of them, as with the learning rate, hide no worker. Needs at least 3 workers."""

    ewma_relearn_rounds: int = flag("--local-sgd-ewma-relearn-rounds", 3)
    """Rounds in which a norm that most workers share is rejected, after which it is a new level, from which the
    detector starts again: no lasting rise, such as the learning rate's, skips a unit in more rounds. 0: never, as in
    the official implementation."""

    pseudo_gradnorm_reduce: bool = flag("--local-sgd-pseudo-gradnorm-reduce", False)
    """Weight the workers by softmax(-norm / temperature) of their pseudo-gradients, unit by unit."""

    weight_softmax_temperature: float | None = flag("--local-sgd-weight-softmax-temperature", None, type=float)
    """Temperature of those weights, 1.0 unless given; needs --local-sgd-pseudo-gradnorm-reduce."""

    weight_scale_free: bool = flag("--local-sgd-weight-scale-free", False)
    """Divide the norms by their mean over the workers before the softmax, so that large layers do not make it
    winner-take-all."""

    clip_pseudo_grad: float | None = flag("--local-sgd-clip-pseudo-grad", None, type=float)
    """Clip the common pseudo-gradient of each unit to this norm; usually 1 or 10."""

    use_step_weight: bool = flag("--local-sgd-use-step-weight", False)
    """With --local-sgd-use-async: weight the workers by the steps that they made since the last round."""

    step_weight_ratio: float = flag("--local-sgd-step-weight-ratio", 0.5)
    """With --local-sgd-use-step-weight and --local-sgd-pseudo-gradnorm-reduce: share of the weights by steps, the rest
    being those by norms."""

    @property
    def has_penalty(self) -> bool:
        """Whether a round has to know all norms before it can reduce."""
        return self.skip_anomaly or self.pseudo_gradnorm_reduce or self.clip_pseudo_grad is not None

    def penalty_problems(self, workers: int | None) -> list[str]:
        """Return the problems of these values, one sentence each.

        Args:
            workers: how many meet; None where that is not known.
        """
        found = self._not_allowed(
            ("ewma_alpha", 0 < self.ewma_alpha < 1, "it must be above 0 and below 1"),
            ("ewma_warmup_steps", self.ewma_warmup_steps >= 2, "it must be at least 2 rounds"),
            ("ewma_relearn_rounds", self.ewma_relearn_rounds >= 0, "it must be 0 (never) or more rounds"),
            ("ewma_threshold", 0 < self.ewma_threshold < math.inf, "it must be a finite number above 0"),
            ("weight_softmax_temperature", _positive(self.weight_softmax_temperature), "it must be finite and above 0"),
            ("clip_pseudo_grad", _positive(self.clip_pseudo_grad), "it must be finite and above 0"),
            ("step_weight_ratio", 0 <= self.step_weight_ratio <= 1, "it must be in 0 to 1"),
        )
        for names, needed in (
            (
                (
                    "ewma_alpha",
                    "ewma_warmup_steps",
                    "ewma_threshold",
                    "ewma_official_start",
                    "ewma_relative",
                    "ewma_relearn_rounds",
                ),
                "skip_anomaly",
            ),
            (("weight_softmax_temperature", "weight_scale_free"), "pseudo_gradnorm_reduce"),
        ):
            for name in names:
                if getattr(self, name) != self.__dataclass_fields__[name].default and not getattr(self, needed):
                    found.append(f"{self._flag(name)} has no effect without {self._flag(needed)}; add it or drop this")
        if self.ewma_relative and workers == 2:
            found.append(
                f"{self._flag('ewma_relative')} needs at least 3 workers: of two that differ, neither is the measure; "
                "drop it"
            )
        return found

    def _not_allowed(self, *rules: tuple[str, bool, str]) -> list[str]:
        """Return a sentence for each (field, whether its value is allowed, what it must be) that is violated."""
        return [f"{self._flag(name)} is {getattr(self, name)}; {rule}" for name, allowed, rule in rules if not allowed]

    def _flag(self, name: str) -> str:
        return flag_of(self.__dataclass_fields__[name])


def _positive(value: float | None) -> bool:
    return value is None or 0 < value < math.inf
