# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a call, as far as the connection shows it."""

from __future__ import annotations

import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

__all__ = ["Operators", "Origin", "end_of"]

_NAMES = ("x509_common_name", "x509_subject_alternative_name", "x509_subject")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The other end of a call."""

    address: str
    """Where it comes from, without the port."""

    certificate: str | None = None
    """Whose certificate it has shown, with mutual TLS: its common name, or its first alternative name without one."""

    metadata: Mapping[str, str | bytes] = field(default_factory=dict)
    """The call's metadata, such as a token."""

    shown: bytes = b""
    """The certificate itself, in DER."""

    @classmethod
    def of_call(cls, context: Any) -> Origin:
        """Return who has made a call, of gRPC's context."""
        shown: Mapping[str, Sequence[bytes]] = context.auth_context()
        names = [name.decode(errors="replace") for key in _NAMES for name in shown.get(key, ()) if name]
        pem = shown.get("x509_pem_cert")
        return cls(
            address=_host_of(context.peer()),
            certificate=names[0] if names else None,
            metadata=dict(context.invocation_metadata()),
            shown=ssl.PEM_cert_to_DER_cert(pem[0].decode()) if pem else b"",
        )


class Operators:
    """Those who may do more than peers may: those that show the server's own certificate, or one that is listed."""

    def __init__(self, own: str, names: Collection[str]) -> None:
        """Take them.

        Args:
            own: PEM file of the server's certificate.
            names: of the other certificates.
        """
        self._own = ssl.PEM_cert_to_DER_cert(_first_certificate(Path(own).read_text()))
        self._names = frozenset(names)

    def include(self, origin: Origin) -> bool:
        """Return whether the other end of a call is one of them."""
        return origin.shown == self._own or origin.certificate in self._names


def end_of(peer: str) -> tuple[str, int] | None:
    """Return address and port of gRPC's name of a caller, None where it has none."""
    kind, _, rest = unquote(peer).partition(":")
    address, _, port = rest.rpartition(":")
    return (address.strip("[]").partition("%")[0], int(port)) if kind in ("ipv4", "ipv6") else None


def _host_of(peer: str) -> str:
    """Return the host of gRPC's name of a caller, such as ipv4:10.0.0.1:4242, ipv6:%5B::1%5D:4242 or unix:."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer


def _first_certificate(pem: str) -> str:
    """Return the first certificate of a chain, which is the holder's own."""
    end = "-----END CERTIFICATE-----"
    begin = pem.index("-----BEGIN CERTIFICATE-----")
    return pem[begin : pem.index(end, begin) + len(end)]
