# SPDX-License-Identifier: Apache-2.0
"""Whether a run is well, in one word and a few sentences."""

from __future__ import annotations

from statistics import median
from typing import Any, Literal

__all__ = ["LEVELS", "Level", "health_of"]

Level = Literal["good", "idle", "attention", "problem"]

LEVELS: dict[Level, str] = {
    "good": "Healthy",
    "idle": "Idle",
    "attention": "Needs attention",
    "problem": "In trouble",
}
"""What people call the levels, from the best to the worst."""

_RECENT = 10
"""Rounds whose length says what is usual."""

_SLOW, _SLOW_SECONDS = 3.0, 10.0
_STUCK, _STUCK_SECONDS = 10.0, 60.0
"""A round is late after this many times the usual length and this many seconds more."""


def health_of(status: dict[str, Any], now: float) -> dict[str, Any]:
    """Return how well a run is.

    Args:
        status: what `overview_of` makes, without its `health`.
        now: seconds since 1970.

    Returns:
        `level`, its `word`, and `reasons`, a list of sentences, the worst first.
    """
    found: list[tuple[Level, str]] = []
    if status["problem"]:
        found.append(("problem", status["problem"]))
    if status["newest_round"] is None:
        found.append(("idle", status["waiting_for"]))
    else:
        found += _of_time(status, now) + _of_peers(status)
    order = list(LEVELS)
    found.sort(key=lambda entry: -order.index(entry[0]))
    level: Level = found[0][0] if found else "good"
    return {"level": level, "word": LEVELS[level], "reasons": [sentence for _, sentence in found]}


def _of_time(status: dict[str, Any], now: float) -> list[tuple[Level, str]]:
    """Return whether the open round takes longer than rounds do."""
    rounds = status["rounds"]
    periods = [entry["period"] for entry in rounds[-_RECENT:] if entry["period"] is not None]
    if not periods or not status["peers"]:
        return []
    usual, since = median(periods), now - rounds[-1]["time"]
    sentence = f"no round for {since:.0f} s, where {usual:.1f} s are usual: {status['waiting_for']}"
    if since > _STUCK * usual + _STUCK_SECONDS:
        return [("problem", sentence)]
    return [("attention", sentence)] if since > _SLOW * usual + _SLOW_SECONDS else []


def _of_peers(status: dict[str, Any]) -> list[tuple[Level, str]]:
    found: list[tuple[Level, str]] = []
    peers, newest = status["peers"], status["newest_round"]
    if not peers:
        return [("idle", "no peer is here: all have left, or were evicted")]
    if len(peers) < status["quorum"]:
        sentence = f"{len(peers)} of {status['places']} peers are here, and a round needs {status['quorum']}"
        found.append(("problem", sentence))
    elif len(peers) < status["places"]:
        found.append(("attention", f"{len(peers)} of {status['places']} peers are here"))
    for peer, reason in status["rejected"].items():
        found.append(("attention", f"round {newest} did not count {peer}: {reason}"))
    for peer in peers:
        if peer["missed"] and status["asynchronous"]:
            times = "contribution" if peer["missed"] == 1 else f"{peer['missed']} contributions"
            found.append(("attention", f"the last {times} of {peer['peer']} did not count"))
        elif peer["missed"]:
            times = "round" if peer["missed"] == 1 else f"{peer['missed']} rounds"
            found.append(("attention", f"the last {times} went without {peer['peer']}"))
    return found
