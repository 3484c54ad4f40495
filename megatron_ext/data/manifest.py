# SPDX-License-Identifier: Apache-2.0
"""Several corpora as one: a file that lists their prefixes, which Megatron takes with --data-args-path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.data.corpus_files import check_corpus
from megatron_ext.errors import UserError

__all__ = ["corpora_in", "read_manifest", "write_manifest"]


def corpora_in(folders: Sequence[Path]) -> list[str]:
    """Return the prefixes of all corpora in folders and the folders in them, sorted inside each by the path's bytes.

    Raises:
        UserError: A folder is not there or has none, one is incomplete, or Megatron could not read its path.
    """
    prefixes: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: is not a folder; give the one with the .bin and .idx files")
        # Absolute, so that a job finds them from every folder, and none of them can be taken for a weight.
        found = [path.with_suffix("") for path in folder.absolute().rglob("*.idx") if not path.name.startswith(".")]
        if not found:
            raise UserError(f"{folder}: has no corpus (.bin and .idx){_other_data(folder)}")
        prefixes += sorted(map(str, found), key=os.fsencode)
    for prefix in prefixes:
        if prefix.split() != [prefix]:
            raise UserError(f"{prefix}: has white space in its path, at which Megatron separates corpora; rename it")
        check_corpus(prefix, option="corpus")
    if len(set(prefixes)) < len(prefixes):
        raise UserError("a folder is given twice, or lies in another one; leave one of them out")
    return prefixes


def _other_data(folder: Path) -> str:
    if any(folder.rglob("*.npy")):
        return "; of token ids (.npy) megatron-ext data prepare --format tokens makes one"
    return "; megatron-ext data prepare makes one"


def write_manifest(path: Path, prefixes: Sequence[str]) -> None:
    """Write a list of corpora, one a line, in place of a former one.

    Raises:
        UserError: It cannot be written, or there is something else.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not _is_list(path):
            raise UserError(
                f"{path}: is there already, and not a list that data list wrote (an absolute path in every line); give "
                "another --output, or remove it"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(f"{prefix}\n" for prefix in prefixes), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def _is_list(path: Path) -> bool:
    """Return whether a file is what `write_manifest` writes, or empty; with weights it is a user's own work."""
    with path.open("rb") as file:
        return all(line.startswith(b"/") and line.split() == [line.removesuffix(b"\n")] for line in file)


def read_manifest(path: Path) -> list[str]:
    """Return the prefixes in a list of corpora, as Megatron reads it: with a weight before each of them, or none.

    Raises:
        UserError: It cannot be read, names no corpus, or has weights before some.
    """
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a list of corpora") from error
    if not words:
        raise UserError(f"{path}: names no corpus; megatron-ext data list writes such a file")
    weights = [_is_number(word) for word in words]
    if len(words) % 2 == 0 and all(weights[::2]):
        words, weights = words[1::2], weights[1::2]
    if any(weights):
        number = words[weights.index(True)]
        raise UserError(f"{path}: has {number} where a corpus is expected; give each a weight before it, or none one")
    return words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
