# SPDX-License-Identifier: Apache-2.0
"""Bringing a run to a rest, so that nothing is lost for anyone when the server ends."""

from __future__ import annotations

import time
from collections.abc import Iterable

from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.presence import Presence

__all__ = ["Draining"]

LINGER_SECONDS = 30.0
"""How long a drained server waits for peers to begin to fetch the last round, when nobody is fetching anything."""

QUIET_SECONDS = 1.0
"""How long nobody must have been fetching when all have begun: a peer has several streams."""


class Draining:
    """Which round is the last one of this server, and who has its values. To be used with the run's lock held."""

    def __init__(self) -> None:
        self.last_round: int | None = None
        """No round is made after this one; None while there is no end."""
        self._begun = 0.0
        self._since: float | None = None
        self._fetched: dict[str, int] = {}
        self._running = 0
        self._last = 0.0

    def begin(self, last_round: int) -> None:
        """Make no round after this one."""
        self.last_round = last_round
        self._begun = time.monotonic()

    def check(self, number: int) -> None:
        """Check that a round may still be made.

        Raises:
            Refusal: the server is being drained; it may be tried again later.
        """
        if self.last_round is not None and number > self.last_round:
            raise Refusal("later", "the server is being drained; try again when it is back")

    def begin_fetching(self, peer: str, number: int) -> None:
        """Say that a stream begins to take the values of a round to a peer."""
        self._fetched[peer] = number
        self._running += 1

    def end_fetching(self) -> None:
        """Say that a stream has ended."""
        self._running -= 1
        self._last = time.monotonic()

    def is_given_up(self, open_round: int, awaited: Iterable[str], presence: Presence) -> bool:
        """Return whether the last round is not made, and those who are awaited in it are gone.

        One who sends no heartbeats may be in a long interval, and is awaited until it is evicted.

        Args:
            open_round: the round that takes contributions.
            awaited: who is awaited in it.
            presence: which processes are alive.
        """
        if self.last_round is None or open_round > self.last_round or self._running:
            return False
        if time.monotonic() - self._begun <= LINGER_SECONDS:
            return False
        return all(presence.is_gone(peer, LINGER_SECONDS) for peer in awaited)

    def lacking(self, members: Iterable[str]) -> list[str]:
        """Return who has not fetched the last round from this server, which may have been another one's."""
        return [peer for peer in members if self._fetched.get(peer) != self.last_round]

    def is_over(self, open_round: int, members: Iterable[str]) -> bool:
        """Return whether the last round is made and everybody has it, or has had the time.

        A stream that has begun is waited for, however long it takes: gRPC ends those whose peers are gone.
        """
        if self.last_round is None or open_round <= self.last_round:
            return False
        if self._since is None:
            self._since = time.monotonic()
        if self._running:
            return False
        lingers = LINGER_SECONDS if self.lacking(members) else QUIET_SECONDS
        return time.monotonic() - max(self._since, self._last) > lingers
