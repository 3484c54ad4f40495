# SPDX-License-Identifier: Apache-2.0
"""The server of the walks in test_resume_walks: the real state machine and journal, and disks that fail."""

import json
from typing import Any

from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.members import Policy
from megatron_ext.sync_service.rounds.round import RunState
from tests.sync_service.rounds.resume_history import KEPT, UNITS, Truth


class Server:
    """Makes rounds, or loses what it has; every event goes through the journal's text."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.journal: list[dict[str, Any]] = []
        self.state = self.replayed()
        self.truth = Truth()
        self.backup: tuple[list[dict[str, Any]], Truth] = ([], Truth())
        self.history = 0
        self.record({"event": "created", "config": {"codec": "fp32"}, "catalog": [], "peers": policy.peers})

    def replayed(self) -> RunState:
        state = (AsynchronousState if self.policy.is_asynchronous else RunState)(self.policy)
        for event in self.journal:
            state.apply(event)
        state.await_everybody()
        return state

    def record(self, event: dict[str, Any]) -> None:
        self.journal.append(json.loads(json.dumps(event)))
        self.state.apply(self.journal[-1])

    @property
    def kept(self) -> range:
        newest = self.state.open_round - 1
        return range(max(0, newest - KEPT + 1), newest + 1)

    def close(self, _dice: int) -> None:
        if self.state.closing is None and self.state.seconds_until_close(0.0) == 0:
            self.record(self.state.closing_event())

    def commit(self, dice: int) -> None:
        closing, number = self.state.closing, self.state.open_round
        if closing is None:
            return
        rejected = {name: "why" for place, name in enumerate(closing) if number and dice >> place & 7 == 7}
        excluded = {name: {"u": "why"} for place, name in enumerate(closing) if dice >> (3 + place) & 3 == 3}
        digest = f"{self.history}x{number}"
        counted = [name for name in closing if name not in rejected]
        excluded = {name: units for name, units in excluded.items() if name in counted}
        made = {"contributors": counted, "rejected": rejected, "excluded": excluded, "digest": digest}
        self.record({"event": "committed", "round": number, "outer_scalars": {}, **made})
        self.truth.digests.append(digest)
        for name in closing if number else ():
            sent = self.truth.pending.pop(name)
            units = frozenset(UNITS) - set(excluded.get(name, ())) if name in counted else frozenset[str]()
            for before in self.truth.judged:
                twice = (
                    before.sent.index == sent.index and before.sent.end > sent.begin and before.sent.begin < sent.end
                )
                assert not (twice and units and before.counted_in), "samples count twice"
            self.truth.count(sent, number, units)
            self.has_judged(sent.index)

    def forget(self, dice: int) -> None:
        """Lose a contribution on the disk."""
        names = [name for name in self.state.uploaded if name in self.truth.pending]
        if names and self.state.closing is None:
            self.lose(names[dice % len(names)])

    def lose(self, name: str) -> None:
        sent = self.truth.pending.pop(name)
        self.record({"event": "forgotten", "round": sent.made_for, "peer": name, "reason": ""})
        self.has_lost(sent.index)

    def restart_server(self, _dice: int) -> None:
        self.state = self.replayed()

    def save_backup(self, _dice: int = 0) -> None:
        self.backup = list(self.journal), self.truth.copy()

    def restore_backup(self, dice: int) -> None:
        """Restore the server's folder from an older copy, with which all peers are started again."""
        journal, truth = self.backup
        self.journal, self.truth = list(journal), truth.copy()
        self.history += 1
        self.state = self.replayed()
        self.has_been_restored()
        for name in list(self.truth.pending):
            if dice % 2 and self.state.closing is None:
                self.lose(name)

    # What the peers' side accounts for.

    def has_judged(self, index: int) -> None:
        """Note that something of a part was judged."""

    def has_lost(self, index: int) -> None:
        """Note that a contribution of a part was lost."""

    def has_been_restored(self) -> None:
        """Note that the history is another one from here on."""
