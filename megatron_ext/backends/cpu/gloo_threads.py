# SPDX-License-Identifier: Apache-2.0
"""The end of a rank: gloo's threads come to rest before the interpreter is taken down.

A collective is over for the rank that waits for it before gloo's worker thread has let go of the tensors, and to let go
of a tensor that Python knows takes the interpreter's lock. A worker that waits for the lock while the interpreter is
taken down is ended by it, in a function that must not be left, and the process aborts ("terminate called without an
active exception"): a run fails after its work was done. On a machine with enough processors the worker is always first.
To destroy the process groups would help as well, but a group's workers live as long as any model refers to it.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

__all__ = ["arm", "disarm", "rest"]

_WORKER = "pt_gloo_runloop"
_LONGEST_SECONDS = 10.0
_PAUSE_SECONDS = 0.001


def arm() -> None:
    """Let the workers come to rest at the interpreter's end, after whatever registers itself later."""
    atexit.register(rest)


def disarm() -> None:
    """Undo `arm`."""
    atexit.unregister(rest)


def rest() -> None:
    """Return when every worker sleeps, whether it has nothing to do or waits for a peer: that may take forever."""
    workers = _workers()
    deadline = time.monotonic() + _LONGEST_SECONDS
    quiet = 0
    # One that waits for the lock sleeps, too, and wakes up in the pause: it is at rest when the next look says so.
    while workers and quiet < 2 and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        quiet = 0 if any(_runs(worker) for worker in workers) else quiet + 1


def _workers() -> list[Path]:
    return [task for task in Path("/proc/self/task").glob("*") if _read(task / "comm").strip() == _WORKER]


def _runs(task: Path) -> bool:
    """Return whether a thread runs or would, had it a processor. The name in parentheses may hold anything."""
    state = _read(task / "stat").rpartition(")")[2].split()
    return state[:1] == ["R"]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        # The thread has ended.
        return ""
