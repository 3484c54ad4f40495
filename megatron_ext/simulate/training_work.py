# SPDX-License-Identifier: Apache-2.0
"""What a simulated job trains, and how long a step of it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SimulatedTraining"]

_OPERATIONS = 6
"""Of a parameter for a token: 2 forward, 4 backward."""


@dataclass(frozen=True, kw_only=True)
class SimulatedTraining:
    """The length of a run, and its steps."""

    steps: int = 10_000
    """Inner steps of every worker; with rounds by time, on average"""

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
        rules = (
            ("steps", self.steps >= 1, "at least 1"),
            ("step-seconds", 0 <= self.step_seconds < math.inf, "above 0"),
            ("step-tokens", self.step_tokens >= 0, "0 or more"),
            ("tflops", 0 <= self.tflops < math.inf, "above 0"),
            ("round-work", 0 <= self.round_work < math.inf, "0 or more"),
        )
        found = [
            f"--{flag} is {getattr(self, flag.replace('-', '_')):g}; give a number {rule}"
            for flag, fits, rule in rules
            if not fits
        ]
        if not found and (self.step_seconds > 0) == (self.tflops > 0):
            found.append("give either --step-seconds or --tflops, above 0")
        if not found and self.tflops > 0 and not self.step_tokens:
            found.append("--tflops needs --step-tokens; give it")
        return found

    def seconds(self, parameters: int, gpus: int) -> float:
        """Return the time of a step of a worker of average speed.

        Args:
            parameters: of the model.
            gpus: of the worker.
        """
        if self.step_seconds > 0:
            return self.step_seconds
        return _OPERATIONS * parameters * self.step_tokens / (gpus * self.tflops * 1e12)
