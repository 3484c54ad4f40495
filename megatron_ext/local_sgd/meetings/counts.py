# SPDX-License-Identifier: Apache-2.0
"""Workers of Megatron's loop that meet by time: an iteration of the loop is a meeting, after inner steps by each.

Between two meetings a worker makes as many steps as its time allows. At a meeting all of them are counted, and
everything that the loop decides by the iteration (rounds, the log, evaluation, saves, the end) comes then, at the same
iteration on all ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.time_based import AsyncSchedule, share_of_rest
from megatron_ext.output_files import output_problems
from megatron_ext.seams.arguments import say
from megatron_ext.worker_groups import WorkerGroups

__all__ = ["Meeting", "MeetingRecorder", "Meetings", "data_places"]


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What all workers know after a meeting."""

    steps: list[int]
    """Of every worker, since the meeting before."""

    since_round: list[int]
    """Of every worker, since the round before."""

    makes_round: bool
    """Whether they are enough for a round."""

    finished: bool
    """Whether all samples of the run have been trained on."""


class Meetings:
    """Counts the inner steps of this worker and, at meetings, of all.

    Attributes:
        record: by meeting, the steps of every worker since the one before.
        places: of every worker, the sample of the data up to which its slices have been read.
        since_round: steps of every worker since the last round, at the last meeting.
    """

    def __init__(
        self,
        config: LocalSGDConfig,
        *,
        groups: WorkerGroups,
        device: torch.device,
        batch: int,
        samples: int,
        consumed: int,
        saved: Mapping[str, Any] | None,
        replay: Sequence[Sequence[int]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue, or begin.

        Args:
            config: the interval's length and the fewest steps of a round.
            groups: of this run.
            device: of the small tensors that are exchanged.
            batch: samples of a global batch, of which a step of a worker takes its slice.
            samples: of the whole run.
            consumed: of them, those that lie behind, of all workers together.
            saved: what `state` returned, if the workers continue where a checkpoint was saved.
            replay: a record to follow instead of the clock, from the first meeting of the run on.
            clock: seconds, never going backwards.
        """
        workers = groups.num_workers
        self._worker = groups.worker
        self._batch = batch
        self.places = data_places(saved, workers, batch, consumed)
        continues = saved is not None and len(saved["places"]) == workers
        self.record: list[list[int]] = [list(steps) for steps in saved["meetings"]] if saved and continues else []
        self.since_round = list(saved["since_round"]) if saved and continues else [0] * workers
        self._left = max(math.ceil((samples - consumed) * workers / batch), 0)
        """Steps of all workers together that are still to be made."""
        # The schedule counts from the last round before this start.
        self._schedule = AsyncSchedule(
            config,
            total_steps=sum(self.since_round) + self._left,
            across=groups.across,
            inside=groups.inside,
            device=device,
            clock=clock,
        )
        self._schedule.start(0)
        self._counts = list(self.since_round)
        """Steps of every worker at the last meeting, as the schedule counts."""
        own = [steps[self._worker] for steps in replay[len(self.record) :]]
        self._schedule.replay([self._counts[self._worker] + total for total in accumulate(own)])
        self._replayed = len(own)

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return not self._left

    def open(self) -> None:
        """Open the window: the first step of an iteration begins."""
        self._schedule.open()

    def another_step(self, made: int, *, told_to_end: bool = False) -> bool:
        """Return whether one more step follows those made since the last meeting; the same on a worker's ranks.

        Args:
            made: steps of this worker since then.
            told_to_end: whether the run is to end, so that the workers meet now; the worker's first rank has the say.
        """
        if not self._replayed and made >= self._most():
            return False
        return not self._schedule.is_over(self._counts[self._worker] + made, early=told_to_end)

    def _most(self) -> int:
        """Return this worker's share of the steps that are left, by what the workers made last."""
        last = self.record[-1] if self.record else [1] * len(self._counts)
        return share_of_rest(self._left, last[self._worker], sum(last))

    def meet(self, made: int) -> Meeting:
        """Wait for the other workers, and count.

        Args:
            made: steps of this worker since the last meeting.
        """
        since_round = self._schedule.meet(self._counts[self._worker] + made)
        counts = self._schedule.counted
        steps = [now - before for now, before in zip(counts, self._counts, strict=True)]
        self._counts = counts
        self.since_round = [before + now for before, now in zip(self.since_round, steps, strict=True)]
        together = since_round or self.since_round
        if since_round is not None:
            self.since_round = [0] * len(counts)
        self.record.append(steps)
        self._left = max(self._left - sum(steps), 0)
        self._replayed = max(self._replayed - 1, 0)
        self.places = [place + each * self._batch for place, each in zip(self.places, steps, strict=True)]
        return Meeting(
            steps=steps, since_round=together, makes_round=since_round is not None, finished=self._schedule.finished
        )

    def count_together(self) -> None:
        """Count a step that all workers made together, in warm-up."""
        self._left = max(self._left - len(self.places), 0)
        self.places = [place + self._batch for place in self.places]
        self._schedule.total_steps = sum(self.since_round) + self._left

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold, the same on all ranks."""
        return {
            "places": list(self.places),
            "batch": self._batch,
            "since_round": list(self.since_round),
            "meetings": [list(steps) for steps in self.record],
        }


def data_places(saved: Mapping[str, Any] | None, workers: int, batch: int, consumed: int) -> list[int]:
    """Return the sample of the data at which each worker continues.

    Nothing is read twice: with another number of workers all continue where the furthest one was, and with another
    batch each at the next whole batch, because slices are those of batches.

    Args:
        saved: what `Meetings.state` returned; None where all workers have walked together.
        workers: of this run.
        batch: samples of a global batch of this run.
        consumed: samples that lie behind, of all workers together.
    """
    if saved is None:
        return [consumed] * workers
    places = [int(place) for place in saved["places"]]
    if len(places) != workers:
        places = [max(places)] * workers
    if saved["batch"] == batch:
        return places
    return [math.ceil(place / batch) * batch for place in places]


class MeetingRecorder:
    """The file of meetings, while a run writes it."""

    def __init__(self, path: str, record: Sequence[Sequence[int]]) -> None:
        """Write what lies behind, in place of what the file may hold of a run that went further and was lost.

        Raises:
            UserError: it cannot be written.
        """
        self._path: Path | None = Path(path)
        if problems := output_problems("--local-sgd-record-meetings", self._path):
            raise UserError(problems[0])
        try:
            self._path.write_text("".join(f"{json.dumps(list(steps))}\n" for steps in record), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--local-sgd-record-meetings {path} cannot be written ({error.strerror}); give a place that can be"
            ) from None

    def write(self, steps: Sequence[int]) -> None:
        """Append a meeting. A full disk costs the file, not the run."""
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(list(steps))}\n")
        except OSError as error:
            say(f"local SGD: meetings are no longer written to {self._path}: {error}")
            self._path = None
