# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's files, which go with a model."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_ext.convert.hf_reader import read_json

__all__ = ["copy_tokenizer", "generation_config", "largest_id", "tokenizer_files", "tokenizer_folder"]

GENERATION = "generation_config.json"
"""The file that says how text is generated."""

_PATTERNS = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
)


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy what `source` has of a tokenizer, and of how text is generated, into `target`.

    Returns:
        Whether there is a tokenizer.
    """
    files = tokenizer_files(source)
    whole = _are_tokenizer(files)
    if not whole:
        files = [file for file in files if file.name == GENERATION]
    if files:
        target.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, target / file.name)  # with the umask's mode, as all of the folder
    return whole


def generation_config(paths: Iterable[Path]) -> Path | None:
    """Return the first file that says how text is generated; None where there is none.

    Args:
        paths: of folders as `tokenizer_folder` takes them.
    """
    found = (folder / GENERATION for path in paths for folder in (path, path / "tokenizer"))
    return next(filter(Path.is_file, found), None)


def tokenizer_folder(path: Path) -> Path | None:
    """Return the folder of a tokenizer: `path`, or `path/tokenizer` as in a checkpoint that a conversion wrote.

    Args:
        path: of anything.

    Returns:
        None where there is no tokenizer.
    """
    return next((folder for folder in (path, path / "tokenizer") if _are_tokenizer(tokenizer_files(folder))), None)


def largest_id(folder: Path) -> int | None:
    """Return the largest id that a tokenizer gives, as far as its JSON files say it; None where they do not.

    Raises:
        UserError: one of them cannot be read.
    """
    ids: list[object] = []
    if (folder / "tokenizer.json").exists():
        content = read_json(folder / "tokenizer.json")
        tokens = content.get("model", {}).get("vocab", {})
        # A list has the tokens in the order of their ids.
        ids += tokens.values() if isinstance(tokens, dict) else range(len(tokens))
        ids += [token.get("id") for token in content.get("added_tokens", [])]
    else:
        for name in ("vocab.json", "added_tokens.json"):
            if (folder / name).exists():
                ids += read_json(folder / name).values()
    return max((value for value in ids if isinstance(value, int)), default=None)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files in a folder that are, or may go with, a tokenizer's."""
    return sorted({file for pattern in _PATTERNS for file in folder.glob(pattern) if file.is_file()})


def _are_tokenizer(files: list[Path]) -> bool:
    return any(file.name.startswith(("tokenizer", "vocab")) for file in files)
