# SPDX-License-Identifier: Apache-2.0
"""What a process uses of memory, processors and threads, as Linux counts it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["forget_peak", "process_peak", "processor_seconds", "thread_count", "thread_seconds"]

_TICKS = os.sysconf("SC_CLK_TCK")


def forget_peak(pid: int) -> None:
    """Let the largest resident memory of a process count from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def process_peak(pid: int) -> int:
    """Return the largest resident memory of a process since `forget_peak`, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"process {pid} has no peak memory")


def processor_seconds(pid: int) -> float:
    """Return the seconds of processors that a process has taken."""
    return _seconds(Path(f"/proc/{pid}/stat"))


def thread_seconds(pid: int) -> dict[str, float]:
    """Return the seconds of processors that each thread of a process has taken, by its number."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[task.name] = _seconds(task / "stat")
        except FileNotFoundError:  # it has ended meanwhile
            continue
    return found


def thread_count(pid: int) -> int:
    """Return how many threads a process has."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
