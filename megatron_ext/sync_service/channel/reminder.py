# SPDX-License-Identifier: Apache-2.0
"""When a long wait is worth another line in the log: a job that stands still says why, and does not fill it."""

from __future__ import annotations

__all__ = ["Reminder"]

_FIRST_SECONDS = 60.0


class Reminder:
    """Of one wait: due after a minute, and then each time that it has become twice as long."""

    def __init__(self) -> None:
        """Begin to wait."""
        self._due_after = _FIRST_SECONDS

    def is_due(self, waited: float) -> bool:
        """Return whether to say something now.

        Args:
            waited: seconds, so far.
        """
        if waited < self._due_after:
            return False
        self._due_after = 2 * waited
        return True
