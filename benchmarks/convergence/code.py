# SPDX-License-Identifier: Apache-2.0
"""Which code a run depends on: the files of the package that its processes had loaded, as they are."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from tests.support.distributed import REPOSITORY
from tests.support.pretrain import SCRIPT

__all__ = ["code_at_start", "digest_of_code", "loaded_sources", "server_sources"]

_PACKAGE = REPOSITORY / "megatron_ext"

def loaded_sources() -> list[str]:
    """Return the training script and what this process has loaded of the package, from the repository's root."""
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    own = {str(file.relative_to(REPOSITORY)) for file in files if file.is_relative_to(_PACKAGE)}
    return sorted(own | {SCRIPT})


def server_sources() -> list[str]:
    """Return the files that decide the values which a sync server returns, from the repository's root."""
    rooms = [f"megatron_ext/{room}/" for room in ("outer", "spes", "sync_service")]
    return [source for source in code_at_start() if source.startswith(tuple(rooms))]


def digest_of_code(sources: Iterable[str]) -> str:
    """Return the SHA-256 of some files as this process found them, and of the versions of torch and Megatron.

    Args:
        sources: from the repository's root; one that is not there any more counts as empty.
    """
    found = hashlib.sha256()
    for name in ("torch", "megatron-core"):
        found.update(f"{name} {metadata.version(name)}\n".encode())
    for source in sources:
        found.update(f"{source} {code_at_start().get(source, '')}\n".encode())
    return found.hexdigest()


@functools.cache
def code_at_start() -> Mapping[str, str]:
    """Return the SHA-256 of every file of the package, and of the training script, when this was first asked.

    A study takes hours, in which somebody may edit them; its processes are forked from one that has loaded them.
    """
    files = [*_PACKAGE.rglob("*.py"), REPOSITORY / SCRIPT]
    return {str(file.relative_to(REPOSITORY)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
