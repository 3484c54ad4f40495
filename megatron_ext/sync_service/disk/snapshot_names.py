# SPDX-License-Identifier: Apache-2.0
"""What the files of snapshots are called, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_ext.sync_service.protocol.catalog import RESERVED

__all__ = ["newest_of", "snapshot_name", "snapshot_number", "state_name"]


def snapshot_name(number: int) -> str:
    """Return the file name of a round's snapshot."""
    return f"round-{number:08d}.safetensors"


def snapshot_number(name: str) -> int | None:
    """Return of which round a file is the snapshot, by its name; None when it is none."""
    found = re.fullmatch(r"round-(\d{8,})\.safetensors", name)
    return None if found is None else int(found[1])


def newest_of(names: Iterable[str]) -> int:
    """Return the newest round of which one of these files is the snapshot; -1 when none is."""
    return max((number for name in names if (number := snapshot_number(name)) is not None), default=-1)


def state_name(state: str, name: str) -> str:
    """Return under which name a tensor's state of the outer optimizer is kept."""
    return f"{RESERVED}{state}:{name}"
