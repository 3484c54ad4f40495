# SPDX-License-Identifier: Apache-2.0
"""HTTP proxies between a caller and a server, which gRPC takes from the environment."""

from __future__ import annotations

import ipaddress
import os

__all__ = ["proxy_variable"]

_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""In gRPC's order. It looks at no others, and at none in capitals."""

_EXEMPTIONS = ("no_grpc_proxy", "no_proxy")
"""The first one that is there counts."""


def proxy_variable(host: str) -> str | None:
    """Return the environment variable with the proxy that gRPC asks for a host; None when it connects directly."""
    exempt = next((os.environ[name] for name in _EXEMPTIONS if name in os.environ), "")
    if any(_is_of(host.strip("[]"), entry.strip()) for entry in exempt.split(",")):
        return None
    return next((name for name in _VARIABLES if os.environ.get(name)), None)


def _is_of(host: str, entry: str) -> bool:
    """Return whether a host has an entry of an exemption as its end, or is in that network."""
    if entry and host.lower().endswith(entry.lower()):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
