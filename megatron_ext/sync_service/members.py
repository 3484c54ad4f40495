# SPDX-License-Identifier: Apache-2.0
"""What the state of a run is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Member", "Policy", "RoundResult"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When a round closes."""

    peers: int
    """Places for peers; the data are cut into so many parts."""

    quorum: int
    """Uploads without which no round closes."""

    grace_seconds: float
    """How long a round stays open after the quorum is reached."""


@dataclass(kw_only=True)
class Member:
    """A peer that belongs to the run."""

    name: str
    """Its name."""

    index: int
    """Its place, which decides its part of the data and its turn in sums."""

    instance: str
    """Which process speaks for it."""

    awaited: bool = True
    """Whether a round stays open for it. A peer that missed a round is awaited again when it takes a round's values."""

    missed: int = 0
    """Rounds since it last contributed."""


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
