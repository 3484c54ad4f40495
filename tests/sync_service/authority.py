# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, and the authority that signs them."""

import datetime
from pathlib import Path

import trustme

__all__ = ["Authority"]


class Authority:
    """Signs certificates, whose files are in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ca, self._folder, self.name = trustme.CA(), folder, name
        self.file = str(folder / f"{name}.ca")
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, *names: str, days: int = 30) -> dict[str, str]:
        """Return `tls_cert` and `tls_key`; with negative days they are over."""
        issued = self._ca.issue_cert(
            *names,
            not_before=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=60),
            not_after=datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days),
        )
        files = {f"tls_{kind}": self._folder / f"{self.name}{names[0]}{days}.{kind}" for kind in ("cert", "key")}
        issued.private_key_pem.write_to_path(files["tls_key"])
        for number, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(files["tls_cert"], append=number > 0)
        return {name: str(file) for name, file in files.items()}
