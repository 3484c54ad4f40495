# SPDX-License-Identifier: Apache-2.0
"""A round that a thread makes while training continues, and what becomes of the steps made meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from megatron_ext.sync_service.peer.parts import Part, Values

if TYPE_CHECKING:
    from megatron_ext.sync_service.peer.client import RoundOutcome

__all__ = ["ThreadedRound", "uncounted", "with_steps_since"]

_LONGEST_SECONDS = 5.0
"""How long the thread of a job that ends in an error is awaited."""


class ThreadedRound:
    """A round in flight. The client and its group of ranks are the thread's alone until `wait` has returned."""

    def __init__(
        self, make: Callable[[], RoundOutcome], contributed: Values, interval: tuple[int, float] = (0, 0.0)
    ) -> None:
        """Begin.

        Args:
            make: makes the round; called in a thread of its own.
            contributed: the values that it is made with, which are this round's own copies.
            interval: steps and seconds of the interval that it ends.
        """
        self.contributed = contributed
        self.interval = interval
        self._make = make
        self._outcome: RoundOutcome | None = None
        self._error: BaseException | None = None
        # A process that ends does not wait for it.
        self._thread = threading.Thread(target=self._run, name="sync-service", daemon=True)
        self._thread.start()

    def wait(self) -> tuple[RoundOutcome, float]:
        """Return what the round gave, and how many seconds that took from now on.

        Raises:
            UserError: as for `SyncClient.sync`, and whatever else has ended the thread.
        """
        begun = time.monotonic()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome, time.monotonic() - begun

    def abandon(self) -> None:
        """Give the thread some seconds to end, after its client was told to; other ranks may keep it."""
        self._thread.join(_LONGEST_SECONDS)

    def _run(self) -> None:
        try:
            self._outcome = self._make()
        except BaseException as error:  # raised again in the thread that waits
            self._error = error


def uncounted(parts: Collection[Part], outcome: RoundOutcome) -> set[str]:
    """Return the keys of the parts in which a round did not count this peer's contribution."""
    return {part.key for part in parts if not outcome.contributed or part.spec.judged_title in outcome.excluded}


def with_steps_since(result: Values, now: Values, contributed: Values, without: Collection[str] = ()) -> Values:
    """Return the values to continue from: a round's result R, moved by the peer's own steps since its contribution S.

        values = R + (now - S)

    What this peer does not train takes R as it is.

    Args:
        result: R, fp32, by the parts' keys.
        now: what this peer trains, after the steps made since, in the same shapes.
        contributed: S, the same parts.
        without: keys that take R as it is: steps from weights that the round left out are left out with them.
    """
    return {
        # Not in place: parts with the same elements share the memory of their results.
        key: value + (now[key] - contributed[key]) if key in contributed and key not in without else value
        for key, value in result.items()
    }
