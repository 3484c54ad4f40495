# SPDX-License-Identifier: Apache-2.0
"""The secret by which the servers of a run know each other: peers have the token, and must not lead a server.

The first server shows it with every call of `Shard`; who shows nothing, or something else, is refused before anything
of the call is done.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.security import SECRET_KEY, read_token
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.server.config import ServerConfig

__all__ = ["ShardSecret"]


class ShardSecret:
    """What the caller of `Shard` has to show."""

    def __init__(self, config: ServerConfig) -> None:
        """Read it.

        Args:
            config: of a server.

        Raises:
            UserError: the file cannot be read, holds none, or holds what peers have.
        """
        secret = read_token(config.shard_secret_file, "shard_secret_file")
        if secret is not None and secret == read_token(config.token_file):
            raise UserError(
                f"shard_secret_file {config.shard_secret_file}: holds the token, which every peer has; make another one"
            )
        self._secret = None if secret is None else secret.encode()

    def check(self, metadata: Mapping[str, str | bytes]) -> None:
        """Check that a call comes from a server of the same run.

        Args:
            metadata: of the call.

        Raises:
            Refusal: it does not.
        """
        shown = metadata.get(SECRET_KEY)
        if self._secret is None and shown is None:
            return  # no caller has to show anything here, see `ServerConfig`
        if self._secret is None:
            raise Refusal(
                "denied",
                "the first server shows a secret, and this one was started without shard_secret_file; give all servers "
                "of shards the same shard_secret_file",
            )
        if shown is None:
            raise Refusal(
                "denied",
                "a server shows the secret of shard_secret_file here, and this caller shows none; give all servers of "
                "shards the same shard_secret_file, and no peer",
            )
        if not hmac.compare_digest(shown if isinstance(shown, bytes) else shown.encode(), self._secret):
            raise Refusal(
                "denied",
                "the first server shows another secret than this one has; give all servers of shards the same "
                "shard_secret_file",
            )
