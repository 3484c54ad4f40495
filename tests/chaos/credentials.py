# SPDX-License-Identifier: Apache-2.0
"""The files with which servers and peers of a run know each other: certificates, a token and the servers' secret."""

from __future__ import annotations

import secrets
from pathlib import Path

import trustme

__all__ = ["Credentials"]


class Credentials:
    """Those of one run, all on this machine."""

    def __init__(self, folder: Path) -> None:
        """Make the files.

        Args:
            folder: where they are; made.
        """
        folder.mkdir()
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(folder / "ca.pem")
        issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
        issued.private_key_pem.write_to_path(folder / "key.pem")
        for name in ("token", "secret"):
            (folder / name).write_text(secrets.token_urlsafe(32))
        names = {"tls_ca": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem", "token_file": "token"}
        self.of_peers = {field: str(folder / name) for field, name in names.items()}
        """Of a connection."""
        self._secret = str(folder / "secret")

    def of_servers(self, count: int) -> dict[str, str]:
        """Return the fields of the configuration of as many servers."""
        asked = {**self.of_peers, "tls_client_ca": self.of_peers["tls_ca"]}
        authority = asked.pop("tls_ca")
        return asked if count == 1 else {**asked, "tls_ca": authority, "shard_secret_file": self._secret}
