# SPDX-License-Identifier: Apache-2.0
"""How much a simulation may do, so that it ends in minutes."""

from __future__ import annotations

from megatron_ext.errors import UserError
from megatron_ext.phrases import short_number

__all__ = ["MOST_EVENTS", "FailureGuard", "longer_than_run", "too_many"]

MOST_EVENTS = 1_000_000
"""Of a kind, such as rounds, checkpoints or failures: a minute or two of simulation."""

_MOST_FAILURES_IN_A_ROW = 1000
"""Of a job, or of a peer in the mean, without progress that a failure leaves: a run with more is not going to end."""


def too_many(option: str, events: float, what: str) -> list[str]:
    """Return why an option's value asks for more than can be simulated, in one sentence; nothing where it does not.

    Args:
        option: with its value.
        events: that it makes in the run.
        what: they are called.
    """
    if events <= MOST_EVENTS:
        return []
    return [
        f"{option} makes {short_number(events)} {what}, of which at most {MOST_EVENTS} are simulated; raise it or "
        "lower --steps"
    ]


def longer_than_run(option: str, seconds: float, run_seconds: float) -> list[str]:
    """Return why no round falls into a run whose rounds are by time, in one sentence; nothing where one does.

    Args:
        option: that says how long an interval is.
        seconds: its value.
        run_seconds: of the run's training.
    """
    if seconds <= run_seconds:
        return []
    return [
        f"{option} {seconds:g} is longer than the {run_seconds:.4g} s of the run's training, so that no round falls "
        "into it; lower it or raise --steps"
    ]


class FailureGuard:
    """Ends the simulation of a run that its failures do not let come to an end."""

    def __init__(self, *, to_next: str, fails: str, shorter: str, processes: int = 1) -> None:
        """Begin with no failure.

        Args:
            to_next: what a failure leaves: a checkpoint, or a round.
            fails: who fails how often.
            shorter: the option that makes what is left come earlier.
            processes: that fail apart.
        """
        self._to_next, self._fails, self._shorter, self._processes = to_next, fails, shorter, processes
        self._progress = self._failures = 0

    def check(self, progress: int, failures: int) -> None:
        """Compare a run with what it was before.

        Args:
            progress: a number that grows with everything that a failure leaves.
            failures: so far.

        Raises:
            UserError: it fails too often.
        """
        if progress > self._progress:
            self._progress, self._failures = progress, failures
        elif failures - self._failures > _MOST_FAILURES_IN_A_ROW * self._processes:
            raise UserError(
                f"the run does not get from one {self._to_next} to the next: {self._fails}; give a shorter "
                f"{self._shorter} or a larger --mtbf-hours"
            )
        if failures > MOST_EVENTS:
            raise UserError(
                f"the run has more than {MOST_EVENTS} failures: {self._fails}; give a larger --mtbf-hours or fewer "
                "--steps"
            )
