# SPDX-License-Identifier: Apache-2.0
"""Which processes are alive, as far as they say so: each counts as alive for some seconds after each of its calls.

A process that trains says nothing else for as long as its interval takes, so peers send heartbeats. One that is killed
sends no more: after those seconds another process may have its peer's place, and no round waits for it. Of a process
that sends none it is not known whether it is alive, however long it has said nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from megatron_ext.phrases import listed
from megatron_ext.sync_service.protocol.durations import LONGEST_ALIVE_SECONDS

__all__ = ["LEAST_SILENCE", "Presence", "silence"]

LEAST_SILENCE = 5.0
"""Seconds for which a process has to say nothing until it is gone, however often it sends heartbeats: threads of a busy
machine come that late."""


def silence(alive_seconds: float) -> float:
    """Return for how many seconds a process says nothing until it is gone; infinity where it sends no heartbeats.

    Args:
        alive_seconds: for which it counts as alive after each of its calls; 0 without heartbeats.
    """
    return max(alive_seconds, LEAST_SILENCE) if alive_seconds else math.inf


class Presence:
    """The processes that speak for the peers of a run. To be used with the run's lock held."""

    def __init__(self) -> None:
        """Know of nobody."""
        self._alive_seconds: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._told: set[str] = set()
        """Of whom it was told that they are gone."""
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

    def was_deaf(self) -> None:
        """Note that this server itself stood still: nobody was silent who could not be heard."""
        self._begun = time.monotonic()

    def heard(self, peer: str) -> None:
        """Note a call of the process that speaks for a peer."""
        self._last[peer] = time.monotonic()
        self._told.discard(peer)

    def alive_until(self, peer: str) -> float | None:
        """Return until when (`time.monotonic`) a peer's process counts as alive; None when it does not.

        The same number for as long as the process says nothing.
        """
        end = self._heard(peer) + self._alive_seconds.get(peer, 0.0)
        return end if end > time.monotonic() else None

    def gone_from(self, peer: str) -> float:
        """Return from when on (`time.monotonic`) a peer is gone, should its process say nothing more.

        Infinity where it sends no heartbeats, and the time of its last word where that was that it ends.
        """
        if not self.is_known(peer):
            return math.inf
        seconds = self._alive_seconds[peer]
        return self._heard(peer) + (silence(seconds) if seconds else 0.0)

    def silent(self, peers: Iterable[str]) -> list[str]:
        """Return of which peers the process sent heartbeats and has stopped; not of those that said that they end."""
        now = time.monotonic()
        return [peer for peer in peers if self._alive_seconds.get(peer) and self.gone_from(peer) <= now]

    def told(self, peers: Iterable[str]) -> str:
        """Return in words which peers are gone; nothing where none is."""
        silent = [f"{peer} for {self.silent_seconds(peer):.0f} s" for peer in self.silent(peers)]
        return f"no heartbeat from {listed(silent, more='other')}" if silent else ""

    def newly_silent(self, peers: Iterable[str]) -> list[str]:
        """Return who is gone and was not when this was asked before."""
        found = [peer for peer in self.silent(peers) if peer not in self._told]
        self._told.update(found)
        return found

    def is_known(self, peer: str) -> bool:
        """Return whether a peer's process says when it is alive."""
        return peer in self._alive_seconds

    def is_gone(self, peer: str, seconds: float) -> bool:
        """Return whether a peer's process says when it is alive, and has not for so long, or longer if it counts so."""
        return self.is_known(peer) and self.silent_seconds(peer) > max(seconds, self._alive_seconds[peer])

    def silent_seconds(self, peer: str) -> float:
        """Return for how many seconds nothing was heard of a peer, since this server can hear at most."""
        return time.monotonic() - self._heard(peer)

    def _heard(self, peer: str) -> float:
        return max(self._last.get(peer, self._begun), self._begun)
