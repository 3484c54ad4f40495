# SPDX-License-Identifier: Apache-2.0
"""What the state of a run is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MOST_PEERS", "Admission", "GoneFrom", "Member", "Policy", "RoundResult", "never"]

MOST_PEERS = 4096
"""That a run may have."""

GoneFrom = Callable[[str], float]
"""Returns until when a peer counts as alive should its process say nothing more, on the clock of the caller."""


def never(peer: str) -> float:
    """Be the `GoneFrom` of who does not know whether peers are alive."""
    return math.inf


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When a round closes."""

    peers: int
    """Places for peers; the data are cut into that many parts."""

    quorum: int
    """Uploads without which no round closes."""

    grace_seconds: float
    """How long a round stays open after the quorum is reached."""

    is_asynchronous: bool = False
    """Whether every contribution is a round of its own."""

    max_staleness: int | None = None
    """More rounds must not have been made since the values that such a contribution started from; None for any."""

    weighs_tokens: bool = False
    """Whether work is counted in tokens, not in steps."""

    def is_stale(self, number: int, open_round: int) -> bool:
        """Return whether such a contribution, made for a round, is too old to be used in the open one."""
        return self.max_staleness is not None and open_round - number > self.max_staleness


@dataclass(kw_only=True)
class Member:
    """A peer that belongs to the run."""

    name: str
    """Its name."""

    index: int
    """Its place, which decides its part of the data and its turn in sums."""

    instance: str
    """Which process speaks for it."""

    alive_seconds: float = 0.0
    """For how long that counts as alive after each of its calls; 0 where it sends no heartbeats."""

    data: str = ""
    """Which data it has said that it trains on; empty where it has not."""

    awaited: bool = True
    """Whether a round stays open for it. A peer that missed a round is awaited again when it asks for the newest."""

    missed: int = 0
    """Rounds since it last contributed; its own contributions since the last that counted, where all are rounds."""


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What became of a round."""

    number: int
    """The round."""

    digest: str
    """Of the new values."""

    contributors: tuple[str, ...]
    """Who counted, in the order of their indices."""

    rejected: dict[str, str]
    """Who was in and did not count, with the reason."""

    excluded: dict[str, dict[str, str]] = field(default_factory=dict)
    """Who counted, but not in these units, with the reasons."""

    kept: tuple[int, ...] = ()
    """Places in the catalog of tensors that it has left as they were, because nobody who trains them counted."""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> RoundResult:
        """Return what `dataclasses.asdict` made of one, through JSON."""
        return cls(**{**entry, "contributors": tuple(entry["contributors"]), "kept": tuple(entry["kept"])})

    def why_without(self, peer: str) -> str:
        """Return why a peer did not count; empty where it did, or is not known to have been in."""
        return self.rejected.get(peer, "" if self.contributors else "nobody's contribution counted")


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What a peer is told that has become a member."""

    index: int
    """Its place."""

    open_round: int
    """The round that takes contributions."""

    shards: tuple[str, ...] = ()
    """Addresses of the servers that have parts of the values, the first one first; none where one has all."""

    shard_of: tuple[int, ...] = ()
    """Which of them has a tensor, in the order of the catalog."""

    warning: str = ""
    """What people at the peer should look at; empty where there is nothing."""
