# SPDX-License-Identifier: Apache-2.0
"""Who may talk to the server: a token in the metadata of every call."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.grpc_health import HEALTH_METHODS
from megatron_ext.sync_service.protocol import grpc

__all__ = ["SECRET_KEY", "TOKEN_KEY", "TokenInterceptor", "read_file", "read_token"]

TOKEN_KEY = "authorization"
SECRET_KEY = "megatron-ext-shard-secret"
"""Beside the token in the calls of servers, see shard_secret.py."""


def read_file(path: str, field: str) -> bytes:
    """Return a file's bytes.

    Raises:
        UserError: it cannot be read; names the configuration's field.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{field} {path}: cannot be read: {error.strerror}") from error


def read_token(path: str | None, field: str = "token_file") -> str | None:
    """Return the token that a file holds, None without a file.

    Args:
        path: of the file.
        field: the configuration's, which names it.

    Raises:
        UserError: the file cannot be read, or holds no token.
    """
    if path is None:
        return None
    token = read_file(path, field).decode("ascii", errors="replace").strip()
    if len(token) < 16 or not token.isprintable() or not token.isascii():
        raise UserError(
            f"{field} {path}: must hold at least 16 printable ASCII characters; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return token


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Refuses every call that does not show the token, but for questions after the server's health."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

        def refuse(_requests: Any, context: Any) -> None:
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong; give the server's token_file"
            )

        # A method that takes one request would first wait for it, in one of the server's threads.
        self._refusal = grpc.stream_stream_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Let a call through, or refuse it."""
        if details.method.startswith(HEALTH_METHODS):
            return continuation(details)
        shown = dict(details.invocation_metadata).get(TOKEN_KEY, "")
        shown = shown if isinstance(shown, bytes) else shown.encode()
        return continuation(details) if hmac.compare_digest(shown, self._wanted) else self._refusal
