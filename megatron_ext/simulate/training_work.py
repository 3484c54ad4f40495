# SPDX-License-Identifier: Apache-2.0
"""What a simulated job trains, and how long a step of it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.phrases import short_number
from megatron_ext.simulate.number_rules import SECONDS, STEP_SECONDS, TFLOPS, NumberRule, number_problems

__all__ = ["MOST_PARAMETERS", "SimulatedTraining"]

_OPERATIONS = 6
"""Of a parameter for a token: 2 forward, 4 backward."""

MOST_PARAMETERS = 10**15
"""Of a model, a thousand times those of the largest."""


@dataclass(frozen=True, kw_only=True)
class SimulatedTraining:
    """The length of a run, and its steps."""

    steps: int = 10_000
    """Inner steps of every worker or peer; with rounds by time, on average"""

    step_seconds: float = 0.0
    """Of a worker's step, as its log shows it, without anything that crosses workers"""

    step_tokens: int = 0
    """Tokens of a worker's step, for tokens per second and --tflops"""

    tflops: float = 0.0
    """In place of --step-seconds: 10^12 operations per second that a GPU reaches, not those of its data sheet; a step
    then takes 6 * parameters * tokens operations"""

    round_work: float = 0.0
    """Seconds of a worker's own work in a round of the whole model (coding, outer step), as 'apply s' of `megatron-ext
    local-sgd report` shows it"""

    def problems(self) -> list[str]:
        """Return what cannot be, one sentence each."""
        rules = {
            "steps": NumberRule(least=1, most=10_000_000),
            "step_seconds": STEP_SECONDS,
            "step_tokens": NumberRule(least=0, most=10**12),
            "tflops": replace(TFLOPS, or_zero=True),
            "round_work": SECONDS,
        }
        found = number_problems(self, rules)
        if not found and self.step_seconds > 0 and self.tflops > 0:
            found.append("--step-seconds and --tflops are two ways to say one thing; drop one of them")
        if not found and not self.step_seconds and not self.tflops:
            found.append("--step-seconds, or --tflops in its place, must be above 0")
        if not found and self.tflops > 0 and not self.step_tokens:
            found.append("--tflops needs --step-tokens; give it")
        return found

    def model_problems(self, parameters: int, gpus: int) -> list[str]:
        """Return why steps of a model cannot be simulated, one sentence each; where `problems` has none.

        Args:
            parameters: of the model.
            gpus: of the worker.
        """
        if parameters > MOST_PARAMETERS:
            return [f"the model has {short_number(parameters)} parameters; at most {MOST_PARAMETERS:g} are simulated"]
        seconds = self.seconds(parameters, gpus)
        if not STEP_SECONDS.allows(seconds):
            return [f"--tflops {self.tflops:g} makes a step of {seconds:g} s; a step is {STEP_SECONDS} s"]
        return []

    def seconds(self, parameters: int, gpus: int) -> float:
        """Return the time of a step of a worker of average speed.

        Args:
            parameters: of the model.
            gpus: of the worker.
        """
        if self.step_seconds > 0:
            return self.step_seconds
        return _OPERATIONS * parameters * self.step_tokens / (gpus * self.tflops * 1e12)
