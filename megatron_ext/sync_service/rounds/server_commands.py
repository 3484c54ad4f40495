# SPDX-License-Identifier: Apache-2.0
"""The commands that messages tell people to run on the folder of a stopped server."""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["compact_command", "recover_command"]


def recover_command(folder: Path, url: str | None = None) -> str:
    """Return what rebuilds the journal in a run's folder, and in the copy at a URL where there is one."""
    return _command("recover", folder, url)


def compact_command(folder: Path, url: str | None = None) -> str:
    """Return what shortens the journal in a run's folder, and in the copy at a URL where there is one."""
    return _command("compact", folder, url)


def _command(action: str, folder: Path, url: str | None) -> str:
    state = () if url is None else ("--state", url)
    return shlex.join(["megatron-ext", "server", action, str(folder), *state])
