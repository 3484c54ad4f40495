# SPDX-License-Identifier: Apache-2.0
"""Which processes are alive, as far as they say so: each counts as alive for some seconds after each of its calls.

A process that trains says nothing else for as long as its interval takes, so peers send heartbeats. One that is killed
sends no more, and after those seconds another process may have its peer's place. Of a process that sends none it is not
known whether it is alive, however long it has said nothing.
"""

from __future__ import annotations

import math
import time

from megatron_ext.sync_service.protocol.durations import LONGEST_ALIVE_SECONDS

__all__ = ["Presence"]


class Presence:
    """The processes that speak for the peers of a run. To be used with the run's lock held."""

    def __init__(self) -> None:
        """Know of nobody."""
        self._alive_seconds: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._begun = time.monotonic()

    def begins(self, peer: str, seconds: float) -> None:
        """Note that another process may speak for a peer now, and for how many seconds it counts as alive after a call.

        Args:
            peer: its name.
            seconds: no more than the longest that is granted count; 0 if it sends no heartbeats.
        """
        self.says(peer, seconds)
        if not self._alive_seconds[peer]:
            del self._alive_seconds[peer]

    def says(self, peer: str, seconds: float) -> None:
        """Note that a peer's process counts as alive for some seconds after each of its calls; for 0 that it does not.

        Args:
            peer: its name.
            seconds: no more than the longest that is granted count.
        """
        is_alive = math.isfinite(seconds) and seconds > 0
        self._alive_seconds[peer] = min(seconds, LONGEST_ALIVE_SECONDS) if is_alive else 0.0

    def heard(self, peer: str) -> None:
        """Note a call of the process that speaks for a peer."""
        self._last[peer] = time.monotonic()

    def alive_until(self, peer: str) -> float | None:
        """Return until when (`time.monotonic`) a peer's process counts as alive; None when it does not.

        The same number for as long as the process says nothing.
        """
        end = self._heard(peer) + self._alive_seconds.get(peer, 0.0)
        return end if end > time.monotonic() else None

    def is_known(self, peer: str) -> bool:
        """Return whether a peer's process says when it is alive."""
        return peer in self._alive_seconds

    def is_gone(self, peer: str, seconds: float) -> bool:
        """Return whether a peer's process says when it is alive, and has not for so long, or longer if it counts so."""
        return self.is_known(peer) and self.silent_seconds(peer) > max(seconds, self._alive_seconds[peer])

    def silent_seconds(self, peer: str) -> float:
        """Return for how many seconds nothing was heard of a peer, since this server has begun at most."""
        return time.monotonic() - self._heard(peer)

    def _heard(self, peer: str) -> float:
        return self._last.get(peer, self._begun)
