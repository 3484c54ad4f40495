# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take: what the machine has free, or what its control groups leave.

A container, or a job of a batch system, is ended at its own limit, however much the machine has free.
"""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["free_memory"]

# By version of the control groups: the limit, what is in use, and that part of it which is given back for the asking.
_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # 1
    "": ("memory.max", "memory.current", "inactive_file"),  # 2
}


def free_memory(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> int:
    """Return bytes.

    Args:
        root: where control groups are mounted.
        process: which groups this process is in; a line for each hierarchy.
    """
    free = int(psutil.virtual_memory().available)
    lines = process.read_text().splitlines() if process.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _FILES:
                top = root / controller
                free = min([free, *(_left(group, *_FILES[controller]) for group in _groups(top, path))])
    return free


def _groups(top: Path, path: str) -> list[Path]:
    """Return the folders of a group and of those that it is in. A container sees its own group as the top."""
    inner = top / path.lstrip("/")
    return [group for group in (inner, *inner.parents) if group == top or top in group.parents]


def _left(group: Path, limit: str, used: str, given_back: str) -> int:
    """Return how much memory a group leaves; as much as there is where it sets no limit."""
    unlimited = 2**63
    try:
        most = (group / limit).read_text().strip()
        if most == "max":
            return unlimited
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(most) - int((group / used).read_text()) + int(statistics.get(given_back, 0))
    except OSError:  # the group is not visible from here, or the top one, which has no limit
        return unlimited
