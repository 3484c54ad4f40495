# SPDX-License-Identifier: Apache-2.0
"""What a Megatron corpus holds, from its files themselves: the largest token id, and a digest of all bytes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_ext.data.corpus_files import token_type
from megatron_ext.data.progress import megabytes
from megatron_ext.errors import UserError

__all__ = ["Contents", "has_no_larger_id", "note_path", "read_contents", "scan"]

_BYTES_AT_ONCE = 1 << 26
_SLOW_BYTES = 2_000_000_000
_TICK_SECONDS = 0.02
"""Longer than two changes of a file that have the same time."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What the files of a corpus hold."""

    largest_id: int
    """No token is larger."""

    digest: str
    """Of all bytes of .idx and .bin."""


def note_path(prefix: str) -> Path:
    """Return where the answer is kept for the next start; a hidden file, which is not an input of a corpus."""
    path = Path(prefix)
    return path.with_name(f".{path.name}.largest_id.json")


def has_no_larger_id(prefix: str, *, below: int) -> int | None:
    """Return the largest id that a type of tokens has, if it is less than `below`, as with 65,536 ids of 16 bits."""
    kind = token_type(Path(f"{prefix}.idx"))
    most: int = 2 ** (8 * kind.itemsize) - 1
    return most if kind.kind == "u" and most < below else None


def read_contents(prefix: str, *, tell: Callable[[str], None]) -> Contents:
    """Return the facts about a corpus' ids.

    All tokens are read, once: the answer is written next to the corpus, and holds for these very files until one of
    them changes. A copy is read again, and so is one whose times were set back.

    Args:
        prefix: Of a corpus that is whole.
        tell: Prints a line: what takes long, and when the answer cannot be kept.

    Raises:
        UserError: Tokens are not integers, or an id is below 0.
    """
    tokens = Path(f"{prefix}.bin")
    _let_times_differ(prefix)
    files, size = _identity(prefix), tokens.stat().st_size
    note = note_path(prefix)
    known = _read(note, files)
    if known is not None:
        return known
    if size > _SLOW_BYTES:
        tell(f"{tokens}: reading {megabytes(size)} for the largest id, once")
    found = scan(prefix)
    try:
        partial = note.with_name(f"{note.name}.{os.getpid()}")
        partial.write_text(json.dumps({"files": files, **asdict(found)}) + "\n", encoding="ascii")
        partial.replace(note)
    except OSError as error:
        if size > _SLOW_BYTES:
            tell(f"{note}: cannot be written ({error.strerror}); the next start reads all tokens again")
    return found


def scan(prefix: str) -> Contents:
    """Read all of a corpus.

    Raises:
        UserError: Tokens are not integers, or an id is below 0.
    """
    path, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    kind = token_type(index)
    if kind.kind not in "iu":
        raise UserError(f"{path}: holds {kind.name} numbers, not token ids; make the corpus again")
    digest = hashlib.blake2b(digest_size=16)
    with index.open("rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            digest.update(part)
    largest, smallest = 0, 0
    with path.open("rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            digest.update(part)
            ids = np.frombuffer(part, kind, count=len(part) // kind.itemsize)
            if ids.size:
                largest, smallest = max(largest, int(ids.max())), min(smallest, int(ids.min()))
    if smallest < 0:
        raise UserError(f"{path}: holds the id {smallest}, below 0; make the corpus again")
    return Contents(largest_id=largest, digest=f"blake2b:{digest.hexdigest()}")


def _identity(prefix: str) -> dict[str, list[int]]:
    """Return a signature that changes when a file is written, replaced, or copied.

    The time of the last change of its inode is the one that no `cp -p`, `touch` or rsync sets; a device's number is
    not looked at, which differs between the hosts of a network file system.
    """
    found = {}
    for suffix in ("bin", "idx"):
        status = os.stat(f"{prefix}.{suffix}")
        found[suffix] = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    return found


def _let_times_differ(prefix: str) -> None:
    """Wait until a change that comes now has another time than the last one of the files."""
    last = max(os.stat(f"{prefix}.{suffix}").st_ctime for suffix in ("bin", "idx"))
    if abs(time.time() - last) < _TICK_SECONDS:
        time.sleep(_TICK_SECONDS)


def _read(note: Path, files: dict[str, list[int]]) -> Contents | None:
    """Return the stored answer for these files; None where there is none, or where it is damaged."""
    try:
        content = json.loads(note.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("files") != files:
        return None
    largest, digest = content.get("largest_id"), content.get("digest")
    if not isinstance(largest, int) or not isinstance(digest, str):
        return None
    return Contents(largest_id=largest, digest=digest)
