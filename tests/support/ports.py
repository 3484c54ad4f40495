# SPDX-License-Identifier: Apache-2.0
"""TCP ports for servers that must know theirs before they start."""

import random
import socket
from pathlib import Path

__all__ = ["free_port", "free_ports"]

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_ports(count: int) -> list[int]:
    """Return TCP ports on which nothing listens, and which the kernel gives to nobody who asks for any port.

    A port that the kernel has chosen would be free again until the server starts seconds later, while other tests open
    hundreds of listeners: a client that is early would talk to one of them forever.
    """
    lowest, highest = (int(number) for number in _EPHEMERAL.read_text().split())
    outside = [*range(_LOWEST, lowest), *range(highest + 1, 65_536)]
    # Not the seeded generator, which is in the same state in every process that runs tests.
    candidates = iter(random.SystemRandom().sample(outside, len(outside)))
    found: list[int] = []
    while len(found) < count:
        port = next(candidates)
        if _is_free(port):
            found.append(port)
    return found


def free_port() -> int:
    """Return one such port."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
