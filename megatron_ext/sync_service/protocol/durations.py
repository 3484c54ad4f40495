# SPDX-License-Identifier: Apache-2.0
"""What numbers of seconds can be waited for."""

from __future__ import annotations

__all__ = [
    "ALIVE_HEARTBEATS",
    "HEARTBEAT_SECONDS",
    "LONGEST_ALIVE_SECONDS",
    "LONGEST_HEARTBEAT_SECONDS",
    "LONGEST_SECONDS",
    "can_be_waited",
]

LONGEST_ALIVE_SECONDS = 60.0
"""For longer no process counts as alive without a further heartbeat."""

HEARTBEAT_SECONDS = 5.0
"""Between two heartbeats, where nobody says otherwise."""

ALIVE_HEARTBEATS = 3
"""Heartbeats that may fail to come before a process no longer counts as alive."""

LONGEST_HEARTBEAT_SECONDS = LONGEST_ALIVE_SECONDS / ALIVE_HEARTBEATS
"""Between two heartbeats."""

LONGEST_SECONDS = 30 * 86400.0
"""A month. The system's own limit is not far above what people write for "forever", and ends the thread that waits."""


def can_be_waited(seconds: float, *, or_zero: bool = False) -> bool:
    """Return whether `seconds` is above 0 (or 0, with `or_zero`) and not beyond the limit; NaN is not."""
    return (seconds >= 0 if or_zero else seconds > 0) and seconds <= LONGEST_SECONDS
