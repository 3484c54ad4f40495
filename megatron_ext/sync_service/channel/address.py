# SPDX-License-Identifier: Apache-2.0
"""Addresses of servers as people write them: HOST:PORT."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback", "split_address"]


def split_address(text: str, *, any_port: bool = False) -> tuple[str, int] | None:
    """Return host and port, None if they are none.

    Args:
        text: HOST:PORT; an IPv6 address in brackets.
        any_port: whether the port may be 0, for one that the system chooses.
    """
    host, _, port = text.rpartition(":")
    # int() would take other scripts' digits, signs and blanks.
    if not (port.isascii() and port.isdecimal()) or not (0 if any_port else 1) <= int(port) <= 65535:
        return None
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not bare or any(sign.isspace() or sign in "/[]\0" for sign in bare) or (":" in bare) != bracketed:
        return None
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name other than localhost may mean any."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
