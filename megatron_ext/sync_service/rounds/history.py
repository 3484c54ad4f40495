# SPDX-License-Identifier: Apache-2.0
"""What has become of the rounds and peers of a run, as the journal tells it, for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from megatron_ext.sync_service.rounds.journal import Event

__all__ = ["KEPT_INCIDENTS", "KEPT_ROUNDS", "History"]

KEPT_ROUNDS = 500
"""How many of the newest rounds are remembered, and stay in a journal that is shortened, unless told otherwise."""

KEPT_INCIDENTS = 100
"""How many of the newest incidents are."""

Entry = dict[str, Any]
"""Plain data that goes to the page and into JSON."""


class History:
    """The newest rounds and incidents. Not for several threads at once."""

    def __init__(self) -> None:
        self.rounds: deque[Entry] = deque(maxlen=KEPT_ROUNDS)
        self.incidents: deque[Entry] = deque(maxlen=KEPT_INCIDENTS)
        self.counts: dict[str, int] = {"committed": 0, "rejected": 0, "evicted": 0}
        self.indices: dict[str, int] = {}
        self.last_seen: dict[str, float] = {}
        self._reports: dict[str, Entry] = {}

    def apply(self, event: Event) -> None:
        """Take an event of the journal in."""
        handlers: dict[str, Callable[[Event], None]] = {
            "joined": self._joined,
            "left": self._left,
            "evicted": self._evicted,
            "uploaded": self._uploaded,
            "forgotten": self._forgotten,
            "closed": self._closed,
            "stale": self._stale,
            "committed": self._committed,
            "recovered": self._recovered,
        }
        handler = handlers.get(event["event"])
        if handler is not None:
            handler(event)

    def seen(self, peer: str, now: float) -> None:
        """Say that a member has called.

        Args:
            peer: its name.
            now: seconds since 1970.
        """
        self.last_seen[peer] = now

    def _incident(self, event: Event, kind: str, peer: str, reason: str) -> None:
        place = {"round": event["round"]} if "round" in event else {}
        self.incidents.append({"time": event["time"], "kind": kind, "peer": peer, "reason": reason, **place})

    def _joined(self, event: Event) -> None:
        self.indices[event["peer"]] = event["index"]
        self.seen(event["peer"], event["time"])

    def _recovered(self, event: Event) -> None:
        """Take in who the peers are, and how many rounds there were; nothing else is known of these."""
        self.counts["committed"] = event["round"]
        for member in event["state"]["members"]:
            self._joined({"peer": member["name"], "index": member["index"], "time": event["time"]})

    def _left(self, event: Event) -> None:
        self._incident(event, "left", event["peer"], "it has ended its membership")
        self.last_seen.pop(event["peer"], None)

    def _evicted(self, event: Event) -> None:
        self.counts["evicted"] += 1
        self._incident(event, "evicted", event["peer"], event["reason"])
        self.last_seen.pop(event["peer"], None)

    def _uploaded(self, event: Event) -> None:
        self._reports[event["peer"]] = {key: event[key] for key in ("bytes", "loss", "steps") if key in event}
        self.seen(event["peer"], event["time"])

    def _forgotten(self, event: Event) -> None:
        self._reports.pop(event["peer"], None)
        self._incident(event, "damaged", event["peer"], event["reason"])

    def _closed(self, event: Event) -> None:
        for peer in event["missing"]:
            self._incident(event, "late", peer, "the round closed without it")

    def _stale(self, event: Event) -> None:
        self.counts["rejected"] += 1
        self._incident(event, "rejected", event["peer"], event["reason"])

    def _committed(self, event: Event) -> None:
        involved = [*event["contributors"], *event["rejected"]]
        reports = {peer: self._reports.pop(peer) for peer in involved if peer in self._reports}
        before = self.rounds[-1]["time"] if self.rounds else None
        self.counts["committed"] += 1
        self.counts["rejected"] += len(event["rejected"])
        self.rounds.append(
            {
                "round": event["round"],
                "time": event["time"],
                # Since the round before was committed; the server's own work is a part of it.
                "period": None if before is None else round(max(0.0, event["time"] - before), 3),
                "reduce_seconds": event["seconds"],
                "bytes": event["bytes"],
                "norms": event["norms"],
                "losses": {peer: report["loss"] for peer, report in reports.items() if report.get("loss") is not None},
                "steps": {peer: report["steps"] for peer, report in reports.items() if "steps" in report},
                "contributors": event["contributors"],
                "rejected": event["rejected"],
                "excluded": event.get("excluded", {}),
                "new_levels": event.get("new_levels", {}),
                "lasting": event.get("lasting", {}),
                "merged": event.get("merged", 0.0),
                **{key: event[key] for key in ("made_for", "weight") if key in event},
            }
        )
        for peer, reason in event["rejected"].items():
            self._incident(event, "rejected", peer, reason)
        for peer, units in event.get("excluded", {}).items():
            self._incident(event, "left out", peer, f"by the guards, of {', '.join(units)}")
        for peer, levels in event.get("new_levels", {}).items():
            units = ", ".join(f"{unit} ({before:.4g} -> {now:.4g})" for unit, (before, now) in levels.items())
            self._incident(event, "new level", peer, f"of its norms, which most peers share, in {units}")
        for peer, reason in event.get("lasting", {}).items():
            self._incident(event, "left out for long", peer, reason)
        for peer, report in reports.items():
            if "loss" in report and report["loss"] is None:
                self._incident(event, "diverged", peer, "its training loss is non-finite")
