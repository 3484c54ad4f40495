# SPDX-License-Identifier: Apache-2.0
"""Finding processes in /proc: the members of a group, and all that carry this test session's mark."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SESSION_MARK = "MEGATRON_EXT_TEST_SESSION"
"""In the environment of everything that a session starts: finds a leftover whoever adopted it."""
SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "tests.sync_service.zygote")
"""Started once, by Python's multiprocessing or for the whole session; they end with the session's own process."""


@dataclass(frozen=True, kw_only=True)
class FoundProcess:
    """A process as /proc shows it."""

    pid: int
    parent: int
    group: int
    zombie: bool
    command: str

    def __str__(self) -> str:
        """Short enough for a message with several of them."""
        return f"{self.pid} ({self.command[:200]})"


def group_exists(group: int) -> bool:
    """Return whether a process group has members, be they zombies only."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def group_members(group: int) -> list[FoundProcess]:
    """Return the living members of a process group."""
    return [found for _, found in _processes() if found.group == group and not found.zombie]


def is_running(pid: int) -> bool:
    """Return whether a process exists and is more than a zombie that nobody has fetched yet."""
    return any(found.pid == pid and not found.zombie for _, found in _processes())


def session_processes(session: str) -> list[FoundProcess]:
    """Return what carries the mark of `session`, without zombies and the servers of this process."""
    return [
        found
        for found in marked_processes(SESSION_MARK, session)
        if found.parent != os.getpid() or not any(name in found.command for name in SERVERS)
    ]


def marked_processes(name: str, value: str) -> list[FoundProcess]:
    """Return what was started with an environment variable of this value, without zombies."""
    mark = f"{name}={value}".encode()
    result = []
    for entry, found in _processes():
        if found.zombie:
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # another user's, or it has ended meanwhile
            continue
        if mark in environment.split(b"\0"):
            result.append(found)
    return result


def _processes() -> Iterator[tuple[Path, FoundProcess]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The name in parentheses may hold spaces; the state, the parent and the group follow it.
            state, parent, group = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (OSError, ValueError):  # it has ended while we looked
            continue
        found = FoundProcess(
            pid=int(entry.name), parent=int(parent), group=int(group), zombie=state == "Z", command=command
        )
        yield entry, found
