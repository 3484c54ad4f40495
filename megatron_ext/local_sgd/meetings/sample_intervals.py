# SPDX-License-Identifier: Apache-2.0
"""Intervals of Megatron's loop that keep their meaning in samples where its iterations are meetings.

An interval of 10 is 10 global batches, whatever workers make of it: what it asks for comes at the first meeting at or
past the next multiple. Megatron reads the intervals from its arguments at every iteration, so that they are set to what
divides the iteration, or does not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SampleIntervals"]

_NAMES = (
    "log_interval",
    "tensorboard_log_interval",
    "eval_interval",
    "save_interval",
    "non_persistent_save_interval",
    "exit_interval",
)


class RetainInterval(int):
    """`--save-retain-interval`, of which Megatron asks whether it divides the iteration of an earlier checkpoint.

    Elsewhere, and in checkpoints, it is the number that was given.
    """

    def __init__(self, value: int) -> None:
        """Begin without a checkpoint that may be deleted; those of an earlier run stay."""
        self.passing: set[int] = set()
        """The iterations of checkpoints that the next one replaces."""

    def __rmod__(self, iteration: int) -> int:
        """Return 0 for a checkpoint that stays."""
        return int(iteration in self.passing)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Be a plain number where Megatron's arguments are written."""
        return int, (int(self),)


class SampleIntervals:
    """The intervals that the command line gives."""

    def __init__(self, args: Any) -> None:
        """Take them from Megatron's arguments."""
        self._args = args
        self._given = {name: getattr(args, name) for name in _NAMES if getattr(args, name, None)}
        self._retained = RetainInterval(args.save_retain_interval) if args.save_retain_interval else None
        if self._retained is not None:
            args.save_retain_interval = self._retained
        self._logged = 0
        self.since_line = 0
        """Iterations since the last line of the log, after `arm`."""

    def arm(self, iterations: int, before: int, after: int, *, last: bool = False) -> None:
        """Make Megatron do what is due now, and nothing else.

        After the last iteration Megatron saves by itself, unless the interval that it was given divides the number of
        iterations: only then the loop has to.

        Args:
            iterations: finished ones, of which the last was a meeting.
            before: global batches that all workers together had made before it.
            after: those that they have made now.
            last: whether training ends here.
        """
        for name, interval in self._given.items():
            is_due = after // interval > before // interval
            if last and name == "save_interval":
                is_due = iterations % interval == 0
            setattr(self._args, name, iterations if is_due else iterations + 1)
            if name == "save_interval" and is_due and self._retained is not None:
                stays = after // self._retained > before // self._retained
                if not stays:
                    self._retained.passing.add(iterations)
            if name == "log_interval":
                self.since_line = iterations - self._logged
                self._logged = iterations if is_due else self._logged

    def begin(self, iterations: int) -> None:
        """Note that the log begins after these iterations."""
        self._logged = iterations
