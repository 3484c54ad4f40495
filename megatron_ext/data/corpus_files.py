# SPDX-License-Identifier: Apache-2.0
"""Whether a Megatron corpus is whole and has documents for every part of a split, told from a few bytes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_ext.data.split import advised_split, parts_without_documents
from megatron_ext.errors import UserError

__all__ = ["HEAD_BYTES", "check_corpus", "check_index", "check_split", "token_type"]

_MAGIC = b"MMIDIDX\x00\x00"
HEAD_BYTES = len(_MAGIC) + 8 + 1 + 8 + 8
"""Of an index: magic, version, kind of token, numbers of sequences and of documents. The sequences' lengths follow."""

_TOKEN_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
"""By Megatron's number for the kind of token."""


def check_index(path: Path) -> int:
    """Return of how many sequences a corpus's index speaks, of which all is there.

    Raises:
        UserError: it is not an index, or incomplete.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
        raise UserError(f"{path}: is not an index of a Megatron corpus; make one with megatron-ext data prepare")
    count, documents = (int(number) for number in np.frombuffer(head, "<u8", count=2, offset=len(_MAGIC) + 9))
    # A length and a place for each sequence, and the first sequence of each document.
    size, wanted = path.stat().st_size, HEAD_BYTES + 12 * count + 8 * documents
    if size < wanted:
        raise UserError(f"{path}: has {size} bytes of {wanted}; it is incomplete: make the corpus again")
    return count


def token_type(path: Path) -> np.dtype[np.generic]:
    """Return the type of a corpus's tokens on disk, which its index tells.

    Raises:
        UserError: Megatron has none of that number.
    """
    with path.open("rb") as file:
        file.seek(len(_MAGIC) + 8)
        name = _TOKEN_TYPES.get(file.read(1)[0])
    if name is None:
        raise UserError(f"{path}: has tokens of a kind that Megatron does not have; make the corpus again")
    return np.dtype(f"<{name}")


def check_corpus(prefix: str, *, option: str = "--data-path") -> None:
    """Refuse a corpus of which something is missing.

    Args:
        prefix: the path of its files without .bin and .idx; nothing is looked at behind a URL.
        option: What the user gives it by, for messages.

    Raises:
        UserError: a file is missing, is something else, or ends too early.
    """
    if "://" in prefix:
        return  # no file of this machine
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for path in (tokens, index):
        if not path.is_file():
            given = Path(prefix)
            is_half = given.suffix in (".bin", ".idx") and given.is_file()
            fix = f"leave out the suffix {given.suffix}" if is_half else "give the prefix of a .bin/.idx corpus"
            raise UserError(f"{option} {prefix}: there is no {path}; {fix}")
    count = check_index(index)
    if count == 0:
        return
    with index.open("rb") as file:
        file.seek(HEAD_BYTES)
        # The sequences lie one after the other, so that the last one's end is that of all.
        length = int(np.fromfile(file, "<i4", count=1, offset=4 * (count - 1))[0])
        place = int(np.fromfile(file, "<i8", count=1, offset=8 * (count - 1))[0])
    size, wanted = tokens.stat().st_size, place + length * token_type(index).itemsize
    if size < wanted:
        raise UserError(f"{tokens}: has {size} bytes, and its index speaks of {wanted}; make the corpus again")


def check_split(prefix: str, split: str) -> None:
    """Refuse a split that leaves a part of a corpus without documents, from which Megatron would not return.

    Args:
        prefix: of a corpus that is whole; nothing is looked at behind a URL.
        split: Megatron's --split.

    Raises:
        UserError: a part other than that for training, which says so itself, is asked for and has none.
    """
    if "://" in prefix:
        return
    count = check_index(Path(f"{prefix}.idx"))
    empty = [name for name in parts_without_documents(count, split) if name != "training"]
    if empty:
        raise UserError(
            f"--split {split}: of the {count} documents of {prefix} none is for {' and '.join(empty)}, and Megatron "
            f"would look for one without end; give that part 0, or more: --split {advised_split(count)}"
        )
