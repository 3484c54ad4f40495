# SPDX-License-Identifier: Apache-2.0
"""Of what a model's perplexity is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_ext.data.split import MEGATRONS_SPLIT
from megatron_ext.phrases import as_option

__all__ = ["PerplexityConfig"]


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig:
    """Of what a model's perplexity is measured."""

    split: str = MEGATRONS_SPLIT
    """Which documents are of which part, as Megatron's --split says."""

    part: Literal["training", "validation", "test"] = "validation"
    """Part whose documents are read."""

    sequence_length: int = 2048
    """Tokens that are predicted together, each of them from those before it."""

    batch_size: int = 8
    """Sequences, or questions of tasks, at a time."""

    max_tokens: int = 0
    """Predicted tokens after which to stop; 0 for the whole part."""

    def problems(self) -> list[str]:
        """Return what cannot be, one sentence each."""
        return [
            f"{as_option(name)} {getattr(self, name)}: give a whole number of at least {least}"
            for name, least in (("sequence_length", 1), ("batch_size", 1), ("max_tokens", 0))
            if getattr(self, name) < least
        ]
