# SPDX-License-Identifier: Apache-2.0
"""A network on one machine: namespaces joined by a bridge, every link limited in both directions (`tc tbf`).

Needs root, and the programs ip and tc (Debian's iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["EmulatedNetwork", "NetworkUnavailable", "emulated_network"]

_DEVICE = "wan"
_SUBNET = "10.78.0"


class NetworkUnavailable(Exception):
    """This machine cannot have such a network; says in words for people why."""


class EmulatedNetwork:
    """Hosts by number, each a namespace with one link to a switch."""

    device = _DEVICE
    """Of a host's end of its link."""

    def __init__(self, hosts: int) -> None:
        """Name them."""
        self._hub = f"simulated-hub-{os.getpid()}"
        self._hosts = [f"simulated-{os.getpid()}-{host}" for host in range(hosts)]

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"{_SUBNET}.{host + 1}"

    def command(self, host: int, words: list[str]) -> list[str]:
        """Return a command that runs others' words on a host."""
        return ["ip", "netns", "exec", self._hosts[host], *words]

    def build(self, stack: ExitStack) -> None:
        """Make namespaces and links.

        Args:
            stack: removes them when it is closed.
        """
        for name in (self._hub, *self._hosts):
            _run("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
        _run("ip", "-n", self._hub, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "switch", "up")
        for host, name in enumerate(self._hosts):
            port = f"port{host}"
            _run("ip", "-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", _DEVICE, "netns", name)
            _run("ip", "-n", self._hub, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", _DEVICE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", _DEVICE, "up")

    def limit(self, mbits: int) -> None:
        """Let every link carry so much, in Mbit/s, each way."""
        for host, name in enumerate(self._hosts):
            for namespace, device in ((name, _DEVICE), (self._hub, f"port{host}")):
                # A bucket of some milliseconds: a smaller one lets the timer decide over the rate, a larger is a gift.
                words = ["rate", f"{mbits}mbit", "burst", f"{max(64, mbits // 2)}kb", "latency", "50ms"]
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *words)


@contextmanager
def emulated_network(hosts: int) -> Iterator[EmulatedNetwork]:
    """Make a network of a number of hosts, and remove it in the end.

    Raises:
        NetworkUnavailable: there cannot be one here.
    """
    if os.geteuid() != 0:
        raise NetworkUnavailable("network namespaces need root; start this as root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NetworkUnavailable(f"there is no {program} on the PATH; install iproute2")
    network = EmulatedNetwork(hosts)
    with ExitStack() as stack:
        network.build(stack)
        yield network


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NetworkUnavailable(f"{' '.join(words)}: {done.stderr.strip()}")
