# SPDX-License-Identifier: Apache-2.0
"""Certificates by files, for both sides, and the errors of a connection that fails over them."""

from __future__ import annotations

import ssl
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.security import read_file
from megatron_ext.sync_service.protocol.protocol import grpc

__all__ = ["client_credentials", "server_credentials", "validity_problem", "what_tls_says"]

# What BoringSSL and gRPC say in the details of a call, and what it means.
_MEANINGS = (
    ("certificate has expired", "the server's certificate has expired; give the server a new one (tls_cert, tls_key)"),
    ("certificate is not yet valid", "the server's certificate is not valid yet; compare the clocks of both machines"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the authority in tls_ca has not signed the server's certificate; give the one that has",
    ),
    (
        "Hostname Verification Check failed",
        "the server's certificate is for another name than the one in this address; use a name that it has, or give "
        "the server one with this name or address among its subjectAltName",
    ),
    ("WRONG_VERSION_NUMBER", "the server has no TLS; drop tls_ca, or give the server tls_cert and tls_key"),
)


# OpenSSL's codes for a certificate that is not valid yet, and for one that has expired.
_OF_TIME = (9, 10)


def what_tls_says(details: str) -> str | None:
    """Return what the details of a failed call mean, and what to do; None if TLS has nothing to do with it."""
    return next((meaning for words, meaning in _MEANINGS if words in details), None)


def server_credentials(cert: str, key: str, client_ca: str | None) -> Any:
    """Return gRPC's credentials of a server.

    Raises:
        UserError: a file cannot be used; names its field.
    """
    authority = None if client_ca is None else _authority(client_ca, "tls_client_ca")
    return grpc.ssl_server_credentials(
        [_pair(cert, key)], root_certificates=authority, require_client_auth=client_ca is not None
    )


def client_credentials(ca: str, cert: str | None, key: str | None) -> Any:
    """Return gRPC's credentials of a client, which has a certificate of its own with mutual TLS.

    Raises:
        UserError: a file cannot be used; names its field.
    """
    own_key, own_cert = None, None
    if cert is not None and key is not None:
        own_key, own_cert = _pair(cert, key)
        problem = validity_problem(cert, key)
        if problem is not None:
            raise UserError(f"tls_cert {cert}: {problem}, so that no server lets this peer in; give a new one")
    return grpc.ssl_channel_credentials(_authority(ca, "tls_ca"), own_key, own_cert)


def validity_problem(cert: str, key: str) -> str | None:
    """Return the problem of a certificate whose key fits: None, or that it has expired."""
    # Python reads a certificate's dates only when it checks them: in a handshake with itself, which needs no socket.
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(cert, key)
    client.load_verify_locations(cert)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.check_hostname = False
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for side in sides * 2:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message if error.verify_code in _OF_TIME else None
        except ssl.SSLError:  # the server's side of an earlier refusal
            return None
    return None


def _pair(cert: str, key: str) -> tuple[bytes, bytes]:
    """Return key and certificate, about which gRPC would only report that it cannot listen."""
    found = _pem(key, "tls_key"), _pem(cert, "tls_cert")
    try:
        # An encrypted key is refused instead of asking a terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"tls_key {key}: is not the key of tls_cert {cert}, or has a password ({reason}); give the two that belong "
            "together, in PEM and without password"
        ) from error
    return found


def _authority(path: str, field: str) -> bytes:
    found = _pem(path, field)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=found.decode("ascii", errors="replace"))
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{field} {path}: has no certificate that can be read ({reason}); give the authority's"
        ) from error
    return found


def _pem(path: str, field: str) -> bytes:
    content = read_file(path, field)
    if b"-----BEGIN " not in content:
        raise UserError(f"{field} {path}: is not a PEM file (there is no line -----BEGIN ...); give the one that is")
    return content
