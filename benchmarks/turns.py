# SPDX-License-Identifier: Apache-2.0
"""Two sides of a comparison that live at the same time and run by turns, block by block of iterations.

While one side runs a block, the processes of the other one sleep in a blocking read. The order of the sides is
ABBA, so that a load that grows or shrinks over the run weighs on both alike.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["Place", "Turns", "turn_of"]

_PATIENCE = timedelta(hours=6)
_FIRST, _READY = "turn/0", "ready"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process stands in the comparison."""

    port: int
    """TCP port of the store on this machine that all processes share."""

    side: int
    """0 or 1."""

    side_processes: int
    """Processes of this side."""

    processes: int
    """Processes of both sides."""

    blocks: int
    """Blocks that each side runs."""


def turn_of(block: int, side: int) -> int:
    """Return the turn in which `side` runs its block number `block`: 0 1, 1 0, 0 1, ..."""
    return 2 * block + (side if block % 2 == 0 else 1 - side)


class Turns:
    """One process's view of the turns, and the time that its blocks took."""

    def __init__(self, place: Place) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

        self._place = place
        self._store = TCPStore("127.0.0.1", place.port, is_master=False, timeout=_PATIENCE)
        self._begun = 0.0
        self.seconds: list[float] = []

    def boundary(self, block: int) -> None:
        """End block `block - 1`, if there is one, and return when block `block`, if there is one, may run."""
        now = time.perf_counter()
        if block > 0:
            self.seconds.append(now - self._begun)
            self._leave(turn_of(block - 1, self._place.side))
        elif self._store.add(_READY, 1) == self._place.processes:
            self._store.set(_FIRST, "")
        if block < self._place.blocks:
            self._store.wait([f"turn/{turn_of(block, self._place.side)}"], _PATIENCE)
            self._begun = time.perf_counter()

    def around(self, step: Callable[..., Any], iterations: int) -> Callable[..., Any]:
        """Wrap a function that runs once per iteration: every `iterations` calls, a block's boundary comes first."""
        calls = 0

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            block, rest = divmod(calls, iterations)
            if rest == 0 and block <= self._place.blocks:
                self.boundary(block)
            calls += 1
            return step(*args, **kwargs)

        return stepped

    def _leave(self, turn: int) -> None:
        if self._store.add(f"left/{turn}", 1) < self._place.side_processes:
            return
        self._store.set(f"turn/{turn + 1}", "")
