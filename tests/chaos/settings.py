# SPDX-License-Identifier: Apache-2.0
"""What kind of run a seed stands for."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.schedule import server_names

__all__ = ["BATCH", "EXPERTS", "OUTER_RATE", "RUN", "STEPS", "Settings", "peer_name"]

RUN = "demo"
STEPS = 4
"""Of an interval."""
BATCH = 8
"""Samples of a step."""
OUTER_RATE = 0.7
"""Of outer SGD."""
EXPERTS = 6
"""Where there are any."""


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

    shards: int = 1
    """Servers that share the values among them."""

    guarded: bool = False
    """Whether contributions are judged and weighted by their norms, from which the server learns."""

    experts: bool = False
    """Whether each peer trains only some experts, which are merged now and then (SPES)."""

    tls: bool = False
    """Whether everything is encrypted, and peers and servers show a token and certificates."""

    @classmethod
    def of_seed(
        cls, seed: int, *, shards: int = 1, guarded: bool = False, experts: bool = False, tls: bool = False
    ) -> Settings:
        """Return the settings that a seed stands for, beside those that are given."""
        dice = random.Random(f"settings {seed}")
        asynchronous = dice.random() < 0.25
        return cls(
            seed=seed,
            quorum=dice.choice((2, 2, 3)),
            asynchronous=asynchronous,
            codec=dice.choice(("fp32", "fp32", "int8")),
            outer_momentum=dice.choice((None, 0.5)),
            save_every=dice.choice((1, 3)),
            shards=shards,
            guarded=guarded,
            experts=experts,
            tls=tls,
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
        """Whether the values of all rounds are worked out from the history: a lossy codec leaves residuals, and a guard
        compares a contribution that comes alone with what the others have sent last, whether it counted or not.
        """
        return self.codec == "fp32" and not self.jobs and not (self.guarded and self.asynchronous)

    @property
    def has_reference(self) -> bool:
        """Whether the run without faults that the final loss is compared with is of the same method: where
        contributions come one by one it has no guards, whose verdicts hang on what came when.
        """
        return not (self.guarded and self.asynchronous)

    @property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """Of every expert, who trains it. The last ones have two owners, except where contributions come one by one:
        there one of several counts as what the others have sent last makes of it.
        """
        if not self.experts:
            return ()
        found = [{expert % self.peers} for expert in range(EXPERTS)]
        for expert in () if self.asynchronous else (EXPERTS - 2, EXPERTS - 1):
            found[expert].add((expert + 1) % self.peers)
        return tuple(tuple(sorted(owners)) for owners in found)

    @property
    def servers(self) -> tuple[str, ...]:
        """What the servers are called."""
        return server_names(self.shards)

    def run_config(self) -> dict[str, Any]:
        """Return the run in the server's configuration."""
        found: dict[str, Any] = {"peers": self.peers, "max_norm": 100.0}
        if self.guarded:
            # Strict enough to strike often: by what was learned, peers then count or do not.
            found |= {
                "skip_anomaly": True,
                "ewma_relative": True,
                "ewma_warmup_steps": 5,
                "ewma_threshold": 1.0,
                "pseudo_gradnorm_reduce": True,
            }
        if self.experts:
            found |= {
                "sync_steps": STEPS,
                "merge_interval": 2 * STEPS,
                "merge_alpha_start": 0.05,
                "merge_decay_steps": 4000,
                "merge_topk": 2,
            }
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
