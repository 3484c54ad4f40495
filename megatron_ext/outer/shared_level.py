# SPDX-License-Identifier: Apache-2.0
"""Telling a new level of norms, which most workers share, from an anomaly, which one of them has alone.

A detector that learns from accepted norms only would reject a lasting rise forever: the learning rate that warms up, a
loss that has changed. What most workers share in several rounds is a level, and the detector has to start from it.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SharedLevels"]

_TENSORS = ("shared", "quiet", "recent")

_OF_LAGGARDS = ("former", "behind")

_MEMORY = 10
"""Rounds running without a shared rejection after which those before count no longer; and rounds of a worker in which
it may follow a level that others have reached before it."""

_ALIKE = 2.0
"""How many times the rise of another worker that is rejected too may be exceeded by one that shares it; and where
another worker has no experience, how many times its norm."""


class SharedLevels:
    """Counts, for every worker and unit, the rounds in which what was rejected of it was shared by most workers."""

    def __init__(self, rounds: int, workers: int, units: int) -> None:
        """Start without experience.

        Args:
            rounds: shared rejections after which there is a new level; at least 1.
            workers: number of workers.
            units: number of units.
        """
        self.rounds = rounds
        self.shared = torch.zeros(workers, units, dtype=torch.int64)
        self.quiet = torch.zeros(workers, units, dtype=torch.int64)
        self.recent = torch.full((rounds, workers, units), torch.nan, dtype=torch.float64)
        # Workers that come one by one reach a level one by one. Who has reached it is a measure for the others by how
        # much higher it is: its norms may be smaller than theirs.
        self.former = torch.full((workers, units), torch.nan, dtype=torch.float64)
        self.behind = torch.full((workers, units), _MEMORY, dtype=torch.int64)

    def take(
        self,
        norms: torch.Tensor,
        *,
        rejected: torch.Tensor,
        present: torch.Tensor,
        fresh: torch.Tensor,
        limits: torch.Tensor,
        means: torch.Tensor,
    ) -> torch.Tensor:
        """Take in a round; return whose level is a new one, (workers, units).

        Args:
            norms: fp64, (workers, units).
            rejected: bool, of the same shape: which norms were too large.
            present: bool: which norms are a measure: finite, above 0, and of a worker that took part.
            fresh: bool: which are of this round; the others are those of their workers' last one, and count no more.
            limits: fp64: up to where a norm of each worker would have been accepted; NaN without experience.
            means: fp64: the means that they were compared with.
        """
        rejected, came = rejected & present, present & fresh
        follows = self.behind < _MEMORY
        growth = torch.where(self.former.isnan(), 0.0, means / self.former)
        shared = _shared(norms, rejected, present, rejected & fresh, limits, norms / means, growth, follows)
        # A norm that one worker has alone is not part of a level, also among rounds that are.
        usable = came & (shared | ~rejected)
        self.recent = torch.where(usable, torch.cat([self.recent[1:], norms[None]]), self.recent)
        self.shared += shared
        self.quiet = torch.where(shared, 0, self.quiet + came)
        new = self.shared >= self.rounds
        self.shared[new | (self.quiet >= _MEMORY)] = 0
        self._remember(new, means, came)
        return new

    def _remember(self, new: torch.Tensor, means: torch.Tensor, came: torch.Tensor) -> None:
        """Take note of who has reached a level, and from where, until all have or have had the time to."""
        self.behind = torch.where(came, (self.behind + 1).clamp(max=_MEMORY), self.behind)
        self.behind = torch.where(new.any(dim=0), 0, self.behind)
        self.behind[new] = _MEMORY
        self.former = torch.where(new, means, self.former)
        self.former[:, (self.behind >= _MEMORY).all(dim=0)] = torch.nan

    def level(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and unbiased variance of the latest norms, fp64, (workers, units); variance 0 of a single one."""
        mean = self.recent.nanmean(dim=0)
        number = (~self.recent.isnan()).sum(dim=0)
        squares = (self.recent - mean).square().nansum(dim=0)
        return mean, squares / (number - 1).clamp(min=1)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        names = _TENSORS if self.former.isnan().all() else (*_TENSORS, *_OF_LAGGARDS)
        return {name: getattr(self, name).clone() for name in names}

    def load(self, state: dict[str, Any], workers: torch.Tensor) -> None:
        """Take over a saved state; without one, as earlier releases left none, restart counting.

        Args:
            state: as `state` returned it, perhaps with another number of rounds.
            workers: whose experience each worker takes over.
        """
        if not all(name in state for name in _TENSORS):
            return
        saved = {name: torch.as_tensor(state[name]) for name in _TENSORS}
        self.shared = saved["shared"].index_select(0, workers).clone()
        self.quiet = saved["quiet"].index_select(0, workers).clone()
        recent = saved["recent"].index_select(1, workers)[-self.rounds :]
        self.recent[self.rounds - len(recent) :] = recent
        if all(name in state for name in _OF_LAGGARDS):
            for name in _OF_LAGGARDS:
                setattr(self, name, torch.as_tensor(state[name]).index_select(0, workers).clone())


def _shared(
    norms: torch.Tensor,
    rejected: torch.Tensor,
    present: torch.Tensor,
    asked: torch.Tensor,
    limits: torch.Tensor,
    rises: torch.Tensor,
    growth: torch.Tensor,
    follows: torch.Tensor,
) -> torch.Tensor:
    """Return which norms more than half of the workers that are present have, or would be accepted with.

    Args:
        norms: fp64, (workers, units), as all that follow are of this shape.
        rejected: bool: which norms were too large.
        present: bool: whose norms are a measure.
        asked: bool: of which rejected norms this is asked.
        limits: fp64: up to where norms of a worker are accepted; NaN without experience.
        rises: fp64: the norms by the means that they were compared with.
        growth: fp64: by how many times a worker's new level is the one before; 0 where there is none to follow.
        follows: bool: whether a worker may follow the others' new levels.
    """
    shared = torch.zeros_like(asked)
    limits = torch.where(limits.isnan(), _ALIKE * norms, limits)
    for worker in asked.any(dim=1).nonzero().view(-1).tolist():
        rise = rises[worker]
        # It would have been accepted, had its own level grown as much.
        is_within = (norms[worker] <= limits) | (follows[worker] & (norms[worker] <= limits[worker] * growth))
        agrees = torch.where(rejected, rise <= _ALIKE * rises, is_within)
        shared[worker] = asked[worker] & (2 * (agrees & present).sum(dim=0) > present.sum(dim=0))
    return shared
