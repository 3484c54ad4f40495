# SPDX-License-Identifier: Apache-2.0
"""Who may talk to the server: a token in the metadata of every call."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from megatron_ext.errors import UserError

__all__ = ["SECRET_KEY", "TOKEN_KEY", "TokenCheck", "read_file", "read_token"]

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


class TokenCheck:
    """Knows the token that callers have to show, if there is one."""

    def __init__(self, token: str | None) -> None:
        """Take the token; None lets everybody in."""
        self._wanted = None if token is None else f"Bearer {token}".encode()

    def is_shown(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether the metadata of a call show the token, or none is needed."""
        if self._wanted is None:
            return True
        shown = dict(metadata).get(TOKEN_KEY, "")
        return hmac.compare_digest(shown if isinstance(shown, bytes) else shown.encode(), self._wanted)
