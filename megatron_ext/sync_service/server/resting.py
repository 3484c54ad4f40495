# SPDX-License-Identifier: Apache-2.0
"""How a run comes to a rest when its server is drained."""

from __future__ import annotations

import logging
import time

from megatron_ext.sync_service.rounds.changes import Changes
from megatron_ext.sync_service.rounds.draining import Draining
from megatron_ext.sync_service.rounds.presence import Presence
from megatron_ext.sync_service.rounds.round import RunState

__all__ = ["Resting"]

log = logging.getLogger(__name__)


class Resting:
    """Brings a run to a rest, or says what that waits for. Its methods may be called from several threads."""

    def __init__(self, name: str, state: RunState, draining: Draining, presence: Presence, changes: Changes) -> None:
        """Take what the run is made of.

        Args:
            name: the run id.
            state: its members and rounds.
            draining: which round is the last one.
            presence: which processes are alive.
            changes: the lock of all of that.
        """
        self._name = name
        self._state = state
        self._draining = draining
        self._presence = presence
        self._changes = changes

    @property
    def is_draining(self) -> bool:
        """Whether it is being brought to a rest."""
        return self._draining.last_round is not None

    def drain(self) -> str:
        """Take no new members, and begin no round after the one for which contributions are there.

        Returns:
            What is waited for, in words.
        """
        with self._changes:
            under_way = self._state.uploaded or self._state.closing is not None
            self._draining.begin(self._state.open_round if under_way else self._state.open_round - 1)
            awaited = self._drained_after()
            log.info("run %s: draining; %s", self._name, awaited)
            return awaited

    def try_to_rest(self) -> bool:
        """Return whether nothing is lost for anyone when the server ends now, or nothing comes any more.

        Where all who are awaited in the last round are gone, the round before becomes the last one.
        """
        with self._changes:
            if self._draining.is_over(self._state.open_round, self._state.members):
                return True
            awaited = self._state.awaited()
            seconds = self._state.seconds_until_close(time.monotonic(), self._presence.gone_from)
            is_stuck = self._state.closing is None and seconds is None
            if not (is_stuck and self._draining.is_given_up(self._state.open_round, awaited, self._presence)):
                return False
            log.warning(
                "run %s: %s, and nothing is heard of %s: the round stays open, with what was uploaded for it",
                *(self._name, self._state.waiting_for(), ", ".join(awaited) or "further peers"),
            )
            # Other servers of the run end, too.
            self._draining.begin(self._state.open_round - 1)
            self._changes.notify_all()
            return True

    def _drained_after(self) -> str:
        """Return in words what is waited for before the server ends."""
        last = self._draining.last_round
        assert last is not None
        if self._state.open_round <= last:
            unknown = [peer for peer in self._state.awaited() if not self._presence.is_known(peer)]
            if not unknown:
                return self._state.waiting_for()
            return (
                f"{self._state.waiting_for()}; no heartbeats say whether {', '.join(unknown)} will come: evict whoever "
                "will not, or end the server as it is (SIGTERM), which loses nothing either"
            )
        lacking = ", ".join(self._draining.lacking(self._state.members))
        if last < 0 or not lacking:
            return "no round is under way"
        return f"no round is under way; {lacking} may still fetch round {last}"
