# SPDX-License-Identifier: Apache-2.0
"""A-EDiT's schedule: rounds by time, so that a fast worker makes more steps instead of waiting (arXiv 2412.07210).

Every worker steps freely until its window of time is over, then meets the others. The wait at that rendezvous is at
most about one step of the slowest worker, whose window ends at the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig

__all__ = ["AsyncSchedule", "makes_round", "share_of_rest", "window_end"]


def window_end(config: LocalSGDConfig, opened: float) -> float:
    """Return until when a worker makes steps: the one during which that time comes is its last before it meets.

    Args:
        config: the window's length.
        opened: when the window was, in seconds.
    """
    return opened + config.local_sgd_sync_time


def makes_round(config: LocalSGDConfig, since: int, *, finished: bool) -> bool:
    """Return whether workers that have met make a round.

    Args:
        config: the fewest steps of a round.
        since: steps of all workers together since the last round.
        finished: whether training is over after this meeting.
    """
    return since >= config.min_total_global_steps or (finished and since > 0)


def share_of_rest(left: int, own: int, together: int) -> int:
    """Return a worker's share of the steps that are left of a run, by what the workers made last.

    So the run ends within a global batch after its samples, however long an interval is.

    Args:
        left: steps of all workers together.
        own: steps of the worker between the last two meetings.
        together: those of all workers.
    """
    return max(math.ceil(left * own / together), 1)


class AsyncSchedule:
    """When a worker meets the others, and what they have done until then."""

    def __init__(
        self,
        config: LocalSGDConfig,
        *,
        total_steps: int | None,
        across: Any,
        inside: Any,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; `start` comes before the first step.

        Args:
            config: the window's length and the fewest steps of a round.
            total_steps: steps of all workers together at which training is over; None leaves that to the caller.
            across: process group of the ranks that hold the same values, one per worker, in worker order.
            inside: process group of all ranks of this worker; None when it is this one alone.
            device: of the small tensors that are exchanged.
            clock: seconds, never going backwards.
        """
        self._config = config
        self.total_steps = total_steps
        self._across = across
        self._inside = inside
        self._device = device
        self._clock = clock
        self._window = 0.0
        self._replay: list[int] = []
        self._synced = torch.zeros(dist.get_world_size(across), dtype=torch.int64)
        self._counted = torch.full_like(self._synced, -1)
        """Every worker's steps at the last meeting."""
        self.meetings: list[int] = []
        self.finished = False

    def start(self, step: int) -> None:
        """Open the first window, after this worker's step number `step`, which is the same on all workers."""
        self._window = self._clock()
        self._synced.fill_(step)

    def open(self) -> None:
        """Open the window again, where something that all workers wait for came after the meeting."""
        self._window = self._clock()

    @property
    def counted(self) -> list[int]:
        """Every worker's steps at the last meeting."""
        return [int(count) for count in self._counted.tolist()]

    def is_over(self, step: int, *, early: bool = False) -> bool:
        """Return whether the window is over after this worker's step number `step`, the same on all its ranks.

        Args:
            step: how many this worker has made.
            early: whether its time is cut short; a replay ends it where the record does all the same.
        """
        if self._replay:
            return step >= self._replay[0]
        over = early or self._clock() >= window_end(self._config, self._window)
        if self._inside is None:
            return over
        decision = torch.tensor(float(over), device=self._device)
        dist.broadcast(decision, group=self._inside, group_src=0)
        return bool(decision)

    def meet(self, step: int) -> list[int] | None:
        """Wait for the other workers; return their steps since the last round, None when those are too few for one.

        Args:
            step: how many this worker has made.

        Raises:
            UserError: no worker has made a step since the last meeting, so that none will: all only wait.
        """
        counts = torch.zeros(len(self._synced), dtype=torch.int64, device=self._device)
        counts[dist.get_rank(self._across)] = step
        dist.all_reduce(counts, group=self._across)
        counts = counts.cpu()
        self.meetings.append(step)
        if self._replay:
            self._replay.pop(0)
        self._window = self._clock()
        self.finished = self.total_steps is not None and int(counts.sum()) >= self.total_steps
        if not self.finished and torch.equal(counts, self._counted):
            raise UserError(
                f"all workers wait, after {int(counts.sum())} of the {self.total_steps} steps of total_global_steps "
                "together: no worker has data left; give a smaller total_global_steps or more data"
            )
        self._counted = counts
        since = (counts - self._synced).tolist()
        if not makes_round(self._config, sum(since), finished=self.finished):
            return None
        self._synced = counts
        return since

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of this worker has to hold."""
        return {"synced": self._synced.tolist(), "meetings": list(self.meetings), "finished": self.finished}

    def load(self, state: dict[str, Any]) -> None:
        """Take over a saved state; the window that was open then restarts."""
        self._synced = torch.tensor(state["synced"], dtype=torch.int64)
        self.meetings = list(state["meetings"])
        self.finished = bool(state["finished"])
        self._window = self._clock()

    def replay(self, meetings: Sequence[int]) -> None:
        """Meet after the steps that another run has recorded instead of by the clock.

        Args:
            meetings: of this worker, from the beginning of training; those that lie behind are left out.
        """
        self._replay = list(meetings[len(self.meetings) :])
