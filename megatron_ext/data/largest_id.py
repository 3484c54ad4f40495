# SPDX-License-Identifier: Apache-2.0
"""The largest token id of a Megatron corpus, from the tokens themselves, where nothing else tells it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_ext.data.corpus_files import token_type
from megatron_ext.data.progress import megabytes
from megatron_ext.errors import UserError

__all__ = ["largest_id", "note_path"]

_TOKENS_AT_ONCE = 1 << 25
_SLOW_BYTES = 2_000_000_000


def note_path(prefix: str) -> Path:
    """Return where the answer is kept for the next start; a hidden file, which is no input of a corpus."""
    path = Path(prefix)
    return path.with_name(f".{path.name}.largest_id.json")


def largest_id(prefix: str, *, below: int, tell: Callable[[str], None]) -> int:
    """Return the largest id, or one that is less than `below` if none can be as large, as with 65,536 ids of 16 bits.

    All tokens are read, once: the answer is written beside the corpus, and holds until the .bin file changes.

    Args:
        prefix: Of a corpus that is whole.
        below: Vocabulary size that the caller will compare with.
        tell: Prints a line: what takes long, and when the answer cannot be kept.

    Raises:
        UserError: Tokens are no integers, or an id is below 0.
    """
    kind = token_type(Path(f"{prefix}.idx"))
    if kind.kind not in "iu":
        raise UserError(f"{prefix}.bin: holds {kind.name} numbers, not token ids; make the corpus again")
    most: int = 2 ** (8 * kind.itemsize) - 1
    if kind.kind == "u" and most < below:
        return most
    tokens = Path(f"{prefix}.bin")
    status = tokens.stat()
    identity = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "type": kind.name}
    note = note_path(prefix)
    known = _read(note)
    if known is not None and {key: known.get(key) for key in identity} == identity:
        return int(known["largest_id"])
    if status.st_size > _SLOW_BYTES:
        tell(f"{tokens}: reading {megabytes(status.st_size)} for the largest id, once")
    largest = _scan(tokens, kind, status.st_size // kind.itemsize)
    try:
        partial = note.with_name(f"{note.name}.{os.getpid()}")
        partial.write_text(json.dumps({**identity, "largest_id": largest}) + "\n", encoding="ascii")
        partial.replace(note)
    except OSError as error:
        if status.st_size > _SLOW_BYTES:
            tell(f"{note}: cannot be written ({error.strerror}); the next start reads all tokens again")
    return largest


def _scan(path: Path, kind: np.dtype[np.generic], count: int) -> int:
    if count == 0:
        return 0
    tokens = np.memmap(path, dtype=kind, mode="r", shape=(count,))
    largest, smallest = 0, 0
    for start in range(0, count, _TOKENS_AT_ONCE):
        part = tokens[start : start + _TOKENS_AT_ONCE]
        largest, smallest = max(largest, int(part.max())), min(smallest, int(part.min()))
    if smallest < 0:
        raise UserError(f"{path}: holds the id {smallest}, below 0; make the corpus again")
    return largest


def _read(note: Path) -> dict[str, int | str] | None:
    """Return what was written down; None where nothing was, or where it is damaged."""
    try:
        content = json.loads(note.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("largest_id"), int) else None
