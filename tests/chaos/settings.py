# SPDX-License-Identifier: Apache-2.0
"""What kind of run a seed stands for."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BATCH", "OUTER_RATE", "RUN", "STEPS", "Settings", "peer_name"]

RUN = "demo"
STEPS = 4
"""Of an interval."""
BATCH = 8
"""Samples of a step."""
OUTER_RATE = 0.7
"""Of outer SGD."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run: how its peers meet, and how often they save."""

    seed: int
    """Of the data, the start and the faults."""

    peers: int = 3
    """Their number."""

    quorum: int = 3
    """Contributions without which no round closes."""

    grace_seconds: float = 5.0
    """How long a round stays open for the others."""

    asynchronous: bool = False
    """Whether every contribution is a round of its own."""

    codec: str = "fp32"
    """Of contributions."""

    outer_momentum: float | None = None
    """Of outer SGD; None for the mean."""

    save_every: int = 1
    """Rounds from one checkpoint of a peer to the next."""

    step_seconds: float = 0.05
    """How long a step takes, beside what it computes."""

    jobs: bool = False
    """Whether the peers are Megatron jobs."""

    @classmethod
    def of_seed(cls, seed: int) -> Settings:
        """Return the settings that a seed stands for."""
        dice = random.Random(f"settings {seed}")
        asynchronous = dice.random() < 0.25
        return cls(
            seed=seed,
            quorum=dice.choice((2, 2, 3)),
            asynchronous=asynchronous,
            codec=dice.choice(("fp32", "fp32", "int8")),
            outer_momentum=dice.choice((None, 0.5)),
            save_every=dice.choice((1, 3)),
        )

    @classmethod
    def of_jobs(cls, seed: int) -> Settings:
        """Return the settings that a seed stands for where the peers are Megatron jobs."""
        dice = random.Random(f"jobs {seed}")
        quorum = dice.choice((1, 2))
        return cls(
            seed=seed,
            peers=2,
            quorum=quorum,
            grace_seconds=20.0,
            outer_momentum=dice.choice((None, 0.5)),
            step_seconds=0.0,
            jobs=True,
        )

    @property
    def is_exact(self) -> bool:
        """Whether the values of all rounds follow from the history alone: a lossy codec leaves residuals."""
        return self.codec == "fp32" and not self.jobs

    def run_config(self) -> dict[str, Any]:
        """Return the run in the server's configuration."""
        found: dict[str, Any] = {"peers": self.peers, "max_norm": 100.0}
        if self.asynchronous:
            found["rounds"] = "asynchronous"
        else:
            found |= {"quorum": self.quorum, "grace_seconds": self.grace_seconds}
        if self.outer_momentum is not None:
            found |= {
                "outer_optimizer": "sgd",
                "outer_optimizer_lr": OUTER_RATE,
                "outer_optimizer_momentum": self.outer_momentum,
            }
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def peer_name(index: int) -> str:
    """Return what the peer of an index is called."""
    return f"p{index}"
