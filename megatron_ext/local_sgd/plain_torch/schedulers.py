# SPDX-License-Identifier: Apache-2.0
"""Keeps workers at the same place of their learning-rate schedules.

A step that a GradScaler skips on one worker counts for rounds there, too, but a loop that steps its scheduler only
after steps that were made leaves that worker's behind. Wherever workers meet, those that are behind catch up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.agreement import (
    canonical,
    differences,
    gather_at,
    gather_objects,
    held_by,
    refuse_together,
    workers_in_words,
)

__all__ = ["SchedulesInStep"]

_ALIKE = "give align_schedulers the same on all workers"


class SchedulesInStep:
    """Compares the workers' schedules wherever they meet, and lets those that are behind catch up."""

    def __init__(self, optimizer: torch.optim.Optimizer, across: Any, inside: Any, say: Callable[[str], None]) -> None:
        """Prepare.

        Args:
            optimizer: whose learning rates are compared.
            across: process group of the ranks that hold the same values, one per worker, in worker order.
            inside: process group of all ranks of this worker; None when it is this one alone.
            say: prints a line.
        """
        self._optimizer = optimizer
        self._across, self._inside = across, inside
        self._say = say
        self._schedulers: tuple[Any, ...] = ()
        self._was_said = False

    def take(self, schedulers: Sequence[Any]) -> None:
        """Take the schedulers that are to be kept in step; all ranks must call it.

        Raises:
            UserError: the ranks' schedulers differ, or one cannot be stepped by its count alone; on all ranks.
        """
        own = [problem for scheduler in schedulers if (problem := _problem(scheduler)) is not None]
        kinds = {"the number of schedulers": canonical(len(schedulers))}
        kinds |= {f"scheduler {place}": type(each).__name__ for place, each in enumerate(schedulers)}
        everyone = gather_at("align_schedulers()", (own, kinds), self._across, self._inside)
        refuse_together([[problems for problems, _ in of_worker] for of_worker in everyone], own)
        ranks = [kinds for of_worker in everyone for _, kinds in of_worker]
        shards = len(everyone[0])
        different = differences(ranks, lambda found: workers_in_words(found, shards), _ALIKE)
        if different:
            raise UserError(different[0])
        self._schedulers = tuple(schedulers)

    def meet(self) -> None:
        """Let schedulers that are behind catch up; say which were, and once where learning rates differ all the same.

        All ranks of the group across workers must call it.
        """
        if self._schedulers:
            places = gather_objects([each.last_epoch for each in self._schedulers], self._across)
            for number, scheduler in enumerate(self._schedulers):
                self._catch_up(scheduler, [theirs[number] for theirs in places])
        if self._was_said:  # alike on all ranks, which compared the same
            return
        different = differences(gather_objects(self._rates(), self._across), workers_in_words, self._way_out())
        if different:
            self._was_said = True
            self._say(different[0])

    def _catch_up(self, scheduler: Any, places: Sequence[int]) -> None:
        """Step a scheduler up to the furthest one of the workers'."""
        furthest = max(places)
        if min(places) == furthest:
            return
        for _ in range(furthest - scheduler.last_epoch):
            scheduler.step()
        self._say(
            f"last_epoch of {type(scheduler).__name__} was {held_by(places, workers_in_words)}, because steps were "
            f"skipped; it is {furthest} on all workers now"
        )

    def _rates(self) -> dict[str, str]:
        """Return the learning rates in words; an optimizer may have none."""
        return {
            f"lr of parameter group {place}": canonical(float(group["lr"]))
            for place, group in enumerate(self._optimizer.param_groups)
            if "lr" in group
        }

    def _way_out(self) -> str:
        if self._schedulers:
            return "each worker keeps its own"
        return (
            "each worker keeps its own. Where steps that a GradScaler skips leave a worker's scheduler behind, "
            "optimizer.align_schedulers(scheduler) lets it catch up in rounds"
        )


def _problem(scheduler: Any) -> str | None:
    """Return why a scheduler cannot be stepped up to the place of another one."""
    name = type(scheduler).__name__
    if not isinstance(getattr(scheduler, "last_epoch", None), int):
        return f"{name} has no last_epoch, by which schedulers are compared; give the ones that it is made of"
    needed = [
        parameter.name
        for parameter in inspect.signature(scheduler.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        return (
            f"{name} steps by {', '.join(needed)}, so that its count does not tell where it is; give all workers the "
            "same values for it instead, and leave it out here"
        )
    return None
