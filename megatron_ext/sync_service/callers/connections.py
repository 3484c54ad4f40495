# SPDX-License-Identifier: Apache-2.0
"""Connections at the server's port: one address has few that have not shown who they are.

gRPC bounds how many there are altogether, and how long one may be without a call, but not how many come from one
address. So a thread looks at the process' sockets now and then, and hangs up the oldest of those that are too many. Who
means it shows the token at once, with its first call, and is counted no longer.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from megatron_ext.sync_service.callers.origin import end_of
from megatron_ext.sync_service.disk.durable import described

__all__ = ["Connections"]

log = logging.getLogger(__name__)

_SECONDS = 1.0
"""Between two looks. One takes about 10 microseconds for each descriptor."""

_SAY_AGAIN_LOOKS = 60

_ADDRESSES = 4096
"""How many addresses are kept as they are written: a look finds the same ones again, and to read one takes long."""


class _End(NamedTuple):
    """The other end of a connection."""

    address: str
    port: int


class _Here(NamedTuple):
    """This end of a connection."""

    descriptor: int
    family: socket.AddressFamily


class Connections:
    """The connections at a port."""

    def __init__(self, port: int, room: int, of_an_address: int) -> None:
        """Take the port.

        Args:
            port: at which the server listens.
            room: how many connections gRPC takes at an address at which it listens: a name may have two.
            of_an_address: connections that one address has until they have shown who they are.
        """
        self._port = port
        self._room = room
        self._of_an_address = of_an_address
        self._lock = threading.Lock()
        self._known: set[_End] = set()
        self._strangers: dict[_End, None] = {}  # the oldest first
        self._looks = 0
        self._silent_until: dict[str, int] = {}  # the look, by what was said
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="connections", daemon=True)

    def start(self) -> None:
        """Look at them until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Look no longer."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def know(self, peer: str) -> None:
        """Count a connection no longer.

        Args:
            peer: gRPC's name of its other end, which has shown the token.
        """
        found = end_of(peer)
        if found is not None:
            with self._lock:
                self._known.add(_End(*found))

    def look(self) -> None:
        """Hang up the oldest connections of every address that has too many, and say so, or that all are taken."""
        self._looks += 1
        with self._lock:
            before = set(self._known)
        found = self._found()
        with self._lock:
            # One that has shown the token meanwhile may have begun too late to be found.
            self._known -= before - found.keys()
            known = set(self._known)
        ends = [*(end for end in self._strangers if end in found), *found]
        strangers = self._strangers = dict.fromkeys(end for end in ends if end not in known)
        counts = Counter(_network_of(end.address) for end in strangers)
        hung_up: Counter[str] = Counter()
        for end in strangers:
            network = _network_of(end.address)
            if counts[network] - hung_up[network] > self._of_an_address:
                _hang_up(found[end].descriptor, self._port, end)
                hung_up[network] += 1
        # A name has one address of a family, and gRPC counts what comes to each of them.
        taken = Counter(here.family for here in found.values())
        self._say(hung_up, max(taken.values(), default=0))

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS):
            try:
                self.look()
            except OSError as error:
                log.error("cannot look at the connections: %s", described(error))

    def _found(self) -> dict[_End, _Here]:
        """Return all connections at the port, by their other ends."""
        found = {}
        for name in os.listdir("/dev/fd"):
            ends = _ends_at(int(name), self._port)
            if ends is not None:
                found[ends[0]] = ends[1]
        return found

    def _say(self, hung_up: Counter[str], taken: int) -> None:
        if taken >= self._room and self._is_due("taken"):
            log.warning(
                "%d of %d connections are taken, further ones are closed; raise connections or the hard limit of open "
                "files; every rank of a peer has one",
                *(taken, self._room),
            )
        if hung_up and self._is_due("hung up"):
            log.warning(
                "hung up the oldest of more than %d connections of %s that have shown no token, as many as an address "
                "has of the limit connections; keep it away with a firewall unless it is a peer",
                *(self._of_an_address, ", ".join(sorted(hung_up))),
            )

    def _is_due(self, what: str) -> bool:
        """Return whether to say something now, which is not said again in the next looks."""
        if self._looks < self._silent_until.get(what, 0):
            return False
        self._silent_until[what] = self._looks + _SAY_AGAIN_LOOKS
        return True


def _ends_at(descriptor: int, port: int) -> tuple[_End, _Here] | None:
    """Return both ends of the connection that a descriptor is, the other one first; None if it is none at the port.

    It may be closed meanwhile. It is not duplicated: gRPC would be told of it for longer than it has it.
    """
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
            return None
        address, its_port = found.getpeername()[:2]
        family = found.family
    except OSError:  # it listens, or has ended
        return None
    finally:
        found.detach()
    return _End(_plain(address), its_port), _Here(descriptor, family)


def _hang_up(descriptor: int, port: int, end: _End) -> None:
    """End a connection, if it is still there; gRPC closes it, as when the other end does that."""
    ends = _ends_at(descriptor, port)
    if ends is None or ends[0] != end:
        return
    with suppress(OSError):
        found = socket.socket(fileno=descriptor)
        try:
            found.shutdown(socket.SHUT_RDWR)
        finally:
            found.detach()


@lru_cache(_ADDRESSES)
def _plain(address: str) -> str:
    """Return an address as gRPC writes it: an IPv4 address that is mapped into IPv6 is one of IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


@lru_cache(_ADDRESSES)
def _network_of(address: str) -> str:
    """Return what one party has: an address of IPv4, the half of an address of IPv6 that is its network."""
    found = ipaddress.ip_address(address)
    if found.version == 4 or found.is_loopback:
        return address
    return str(ipaddress.ip_network((address, 64), strict=False))
