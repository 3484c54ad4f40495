# SPDX-License-Identifier: Apache-2.0
"""Which processes are alive, as far as they say so: each counts as alive for some seconds after every word of it.

A process that trains says nothing else for as long as its interval takes, so peers send heartbeats. One that is killed
sends no more, and after those seconds another process may have its peer's place.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

__all__ = ["ALIVE_HEARTBEATS", "LONGEST_ALIVE_SECONDS", "LONGEST_HEARTBEAT_SECONDS", "Presence"]

LONGEST_ALIVE_SECONDS = 60.0
"""For longer nobody counts as alive without a further word."""

ALIVE_HEARTBEATS = 3
"""Heartbeats that may fail to come before a process no longer counts as alive."""

LONGEST_HEARTBEAT_SECONDS = LONGEST_ALIVE_SECONDS / ALIVE_HEARTBEATS
"""Between two heartbeats."""


@dataclass
class _Said:
    """What a process has said."""

    instance: str
    """Which process."""

    seconds: float
    """For how long it counts as alive after every word."""

    last: float
    """When it has said something, on a clock that never goes back."""


class Presence:
    """The processes that speak for the peers of a run. To be used with the run's lock held."""

    def __init__(self) -> None:
        """Know of nobody."""
        self._said: dict[str, _Said] = {}
        self._last: dict[str, float] = {}
        self._begun = time.monotonic()

    def says(self, peer: str, instance: str, seconds: float) -> None:
        """Note that a process counts as alive for some seconds from now on, and so after every further word of it."""
        if not math.isfinite(seconds) or seconds <= 0:
            self._said.pop(peer, None)
            return
        self._said[peer] = _Said(instance, min(seconds, LONGEST_ALIVE_SECONDS), time.monotonic())

    def heard(self, peer: str, instance: str) -> None:
        """Note that a process has called."""
        self._last[peer] = time.monotonic()
        said = self._said.get(peer)
        if said is not None and said.instance == instance:
            said.last = time.monotonic()

    def seconds_left(self, peer: str) -> float:
        """Return for how many seconds a peer's process counts as alive unless it says something; 0 when it does not."""
        said = self._said.get(peer)
        return 0.0 if said is None else max(0.0, said.last + said.seconds - time.monotonic())

    def silent_seconds(self, peer: str) -> float:
        """Return for how many seconds nothing was heard of a peer, since this server has begun at most."""
        return time.monotonic() - self._last.get(peer, self._begun)
