# SPDX-License-Identifier: Apache-2.0
"""The files with which servers and peers of a run know each other: certificates, a token and the servers' secret."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.sync_service.authority import Authority

__all__ = ["Credentials"]


class Credentials:
    """Those of one run, all on this machine."""

    def __init__(self, folder: Path) -> None:
        """Make the files.

        Args:
            folder: where they are; made.
        """
        folder.mkdir()
        for name in ("token", "secret"):
            (folder / name).write_text(secrets.token_urlsafe(32))
        authority = Authority(folder, "chaos")
        self._authority, self._secret = authority.file, str(folder / "secret")
        self._own = {**authority.issue("127.0.0.1"), "token_file": str(folder / "token")}
        self.of_peers = {**self._own, "tls_ca": authority.file}
        """Of a connection."""

    def of_servers(self, count: int) -> dict[str, str]:
        """Return the fields of the configuration of as many servers."""
        among = {"tls_ca": self._authority, "shard_secret_file": self._secret} if count > 1 else {}
        return {**self._own, "tls_client_ca": self._authority, **among}
