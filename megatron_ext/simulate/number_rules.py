# SPDX-License-Identifier: Apache-2.0
"""What numbers the fields of a simulation may hold: all of them end in figures, none in inf, nan or a full memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.phrases import as_option, short_number

__all__ = ["BANDWIDTH", "LATENCY", "SECONDS", "SEED", "STEP_SECONDS", "TFLOPS", "NumberRule", "number_problems"]


@dataclass(frozen=True, kw_only=True)
class NumberRule:
    """A range of numbers, its ends included."""

    least: float
    """The lower end."""

    most: float = math.inf
    """The upper end; none where infinite, which itself is outside."""

    or_zero: bool = False
    """Whether 0 stands for nothing, below the range."""

    of_most: str = ""
    """The option whose value the upper end is."""

    def allows(self, value: float) -> bool:
        """Return whether a number is inside; nan is not."""
        inside = self.least <= value <= self.most and value != math.inf
        return inside or (self.or_zero and value == 0)

    def __str__(self) -> str:
        """Return the range in words."""
        if self.most == math.inf:
            return f"of at least {short_number(self.least)}"
        option = f"{self.of_most} " if self.of_most else ""
        zero = ", or 0 for none" if self.or_zero else ""
        return f"from {short_number(self.least)} to {option}{short_number(self.most)}{zero}"


BANDWIDTH = NumberRule(least=1e-6, most=1e9)
"""Gbit/s or GB/s of a link, and MB/s of a reduction."""

LATENCY = NumberRule(least=0, most=1e6)
"""Milliseconds of a message."""

SECONDS = NumberRule(least=0, most=1e6)
"""Of what a run does beside its steps."""

STEP_SECONDS = NumberRule(least=1e-6, most=1e6, or_zero=True)
"""Of a step."""

TFLOPS = NumberRule(least=1e-6, most=1e6)
"""10^12 operations per second of a GPU."""

SEED = NumberRule(least=0, most=2**63 - 1)
"""What generators of random numbers take."""


def number_problems(config: Any, rules: Mapping[str, NumberRule]) -> list[str]:
    """Return what is outside its range, one sentence each.

    Args:
        config: a dataclass whose fields are options of the same names.
        rules: by field.
    """
    return [
        f"{as_option(name)} is {short_number(value)}; give a number {rule}"
        for name, rule in rules.items()
        if not rule.allows(value := getattr(config, name))
    ]
