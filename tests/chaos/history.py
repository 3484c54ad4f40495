# SPDX-License-Identifier: Apache-2.0
"""What has happened in a run: the server's journal, what the peers wrote down, the faults, and how processes ended."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.sync_service.rounds.journal import parse_journal
from tests.chaos.schedule import Fault
from tests.chaos.settings import Settings, peer_name

__all__ = ["End", "History", "JournalTail", "Struck"]

Event = dict[str, Any]


@dataclass(kw_only=True)
class Struck:
    """A fault that has happened."""

    fault: Fault
    begun: float
    """On the machine's clock that never goes back, as all times here."""
    ended: float = float("inf")
    outcome: str = ""
    """What became of it, where there is something to say: a bit flip is refused, noticed, or healed."""

    def touches(self, peer: str, servers: Sequence[str]) -> bool:
        """Return whether a peer may lose an interval by it: what strikes a server strikes all."""
        return self.fault.target in (peer, *servers)


@dataclass(frozen=True, kw_only=True)
class End:
    """A process that ended though nobody had killed it."""

    who: str
    at: float
    code: int
    said: str
    """Its last line."""


@dataclass(kw_only=True)
class History:
    """Everything that the model looks at."""

    settings: Settings
    journal: list[Event] = field(default_factory=list)
    """All lines that there were, in the order in which they came; `seen` is when."""
    peers: dict[str, list[Event]] = field(default_factory=dict)
    """What each peer has written down."""
    struck: list[Struck] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    stuck: str = ""
    """What did not come when all faults were over; empty where all came."""
    stop: int = -1
    """The round after which peers ended."""
    loss: float = float("nan")
    """Of the values that they ended with."""
    faultless_loss: float = float("nan")
    """Of a run of as many rounds without a fault."""
    faultless: History | None = None
    """Of that run, where it was made as this one was: of jobs."""
    seconds: float = 0.0
    """From the first interval to the last."""

    @property
    def names(self) -> list[str]:
        """The peers' names, by index."""
        return [peer_name(index) for index in range(self.settings.peers)]

    def events(self, kind: str) -> list[Event]:
        """Return the journal's events of a kind."""
        return [event for event in self.journal if event["event"] == kind]

    def commits(self) -> dict[int, Event]:
        """Return the event that commits a round, by round; the last one where there are several."""
        return {event["round"]: event for event in self.events("committed")}

    def said(self, peer: str, *kinds: str) -> list[Event]:
        """Return what a peer has written down of some kinds."""
        return [entry for entry in self.peers.get(peer, []) if entry["event"] in kinds]

    def recovered(self, struck: Struck) -> float:
        """Return when every peer had counted in a round again after a fault; infinite if that never was.

        A journal that was rebuilt tells of its last round once more, which is none after the fault.
        """
        lacking = set(self.names)
        committed = list(self.events("committed"))
        before = max((event["round"] for event in committed if event["seen"] <= struck.ended), default=-1)
        for event in committed:
            if event["seen"] > struck.ended and event["round"] > before:
                lacking -= set(event["contributors"])
                if not lacking:
                    return event["seen"]
        return float("inf")

    def read_peers(self, folder: Path) -> None:
        """Read what the peers have written down."""
        for name in self.names:
            path = folder / f"{name}.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            self.peers[name] = [json.loads(line) for line in lines]
        for struck in self.struck:
            if struck.fault.kind == "poisoned values":
                # It strikes when the peer's next interval is over.
                took = [entry["at"] for entry in self.said(struck.fault.target, "poisoned")]
                struck.ended = min((at for at in took if at > struck.begun), default=struck.ended)


class JournalTail:
    """Follows a journal while it grows, also where it is replaced by one that was rebuilt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._known: set[str] = set()
        self.events: list[Event] = []

    def look(self) -> None:
        """Take in what is new."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._size:
                    self._size = 0
                file.seek(self._size)
                found = parse_journal(file.read())
        except FileNotFoundError:
            return
        self._size += len(found.whole)
        for event in found.events:
            line = json.dumps(event)
            if line not in self._known:
                self._known.add(line)
                self.events.append({**event, "seen": time.monotonic()})

    def look_again(self) -> None:
        """Take in all that is there, after another hand had the file."""
        self._size = 0
        self.look()

    @property
    def newest(self) -> int:
        """The newest committed round; -1 for none."""
        return max((event["round"] for event in self.events if event["event"] == "committed"), default=-1)
