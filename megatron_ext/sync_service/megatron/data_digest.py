# SPDX-License-Identifier: Apache-2.0
"""Which data a job trains on, as a few letters: equal wherever a machine has the files, and other for other files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["data_digest"]

_END_BYTES = 65536
"""Read at the beginning and at the end of a file: the sizes of its documents, and its tokens, differ there."""
_LETTERS = 16


def data_digest(args: Any) -> str:
    """Return the digest of what the training data are.

    It is of the weights and corpora in their order: of each the sizes of its .idx and .bin, and what is at their
    beginning and end. A corpus without local files (a folder, a URL) counts by its name without the folders above it.

    Args:
        args: Megatron's arguments.

    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.sha256(b"mock" if args.mock_data else b"")
    try:
        for listed in _lists(args):
            for word in _canonical([word.strip() for word in listed]):
                for part in _described(word):
                    digest.update(len(part).to_bytes(8, "big") + part)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # of lists, too, that are none
        raise UserError(f"the training data cannot be read: {error}; name files that this job can read") from error
    return digest.hexdigest()[:_LETTERS]


def _lists(args: Any) -> Iterator[list[str]]:
    """Yield weights and prefixes as the options list them, or the files that these name."""
    yield list(map(str, args.data_path or ()))
    yield list(map(str, args.train_data_path or ()))
    if args.data_args_path is not None:
        yield Path(args.data_args_path).read_text(encoding="utf-8").split()
    if args.per_split_data_args_path is not None:
        listed = json.loads(Path(args.per_split_data_args_path).read_text(encoding="utf-8")).get("train") or ()
        yield listed.split() if isinstance(listed, str) else list(map(str, listed))


def _canonical(words: list[str]) -> list[str]:
    """Return a list with equal weights written equally: 1, 1.0 and 1e0. It has weights as Megatron sees any."""
    if len(words) % 2:
        return words
    try:
        weights = [repr(float(word)).removesuffix(".0") for word in words[::2]]
    except ValueError:
        return words
    return [word for pair in zip(weights, words[1::2], strict=True) for word in pair]


def _described(word: str) -> Iterator[bytes]:
    """Yield what says which corpus, or which weight, is meant."""
    files = [path for path in (f"{word}.idx", f"{word}.bin", word) if os.path.isfile(path)]
    if not files:
        yield PurePath(word).name.encode(errors="surrogateescape")
    for path in files:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            yield str(size).encode()
            yield file.read(_END_BYTES)
            file.seek(max(0, size - _END_BYTES))
            yield file.read()
