# SPDX-License-Identifier: Apache-2.0
"""A vocabulary as the user gives it, and what is known of it on this machine."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.data.tokenizers import TokenizerSpec, tokens_digest
from megatron_ext.errors import UserError

__all__ = ["Vocabulary", "VocabularyConfig", "folder_of", "given_vocabulary", "of_tokenizer"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig:
    """A vocabulary as the user gives it: at most one of the three; none leaves it to the corpus' record."""

    tokenizer: TokenizerSpec | None = None
    """A Hugging Face tokenizer: a folder, or a name of the hub."""

    vocab_size: int | None = None
    """Number of ids, of which the last one ends documents."""

    vocab_file: str | None = None
    """JSON file of a GPT-2 vocabulary."""

    merge_file: str | None = None
    """Its merges."""

    tokenizer_name: str = "--tokenizer"
    """What `tokenizer` is given by, for messages."""

    vocab_size_name: str = "--vocab-size"
    """What `vocab_size` is given by."""

    files_names: tuple[str, str] = ("--vocab-file", "--merge-file")
    """What the two files are given by."""

    data_name: str = "PREFIX"
    """What a corpus is given by."""

    def validate(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: Names every bad field.
        """
        wrong = []
        files, (vocab_name, merge_name) = (self.vocab_file, self.merge_file), self.files_names
        if (self.vocab_file is None) != (self.merge_file is None):
            wrong.append(f"{vocab_name} is {files[0]} and {merge_name} {files[1]}; give both, or neither")
        given = {
            self.tokenizer_name: self.tokenizer,
            self.vocab_size_name: self.vocab_size,
            vocab_name: self.vocab_file,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            wrong.append(f"{' and '.join(names)} each say which vocabulary it is; give one of them")
        if self.vocab_size is not None and self.vocab_size < 1:
            wrong.append(f"{self.vocab_size_name} is {self.vocab_size}; give a whole number above 0")
        if wrong:
            raise UserError("; ".join(wrong))

    def ways(self) -> str:
        """Return how to give a vocabulary, as the end of a message."""
        vocab_name, merge_name = self.files_names
        return (
            f"set {self.tokenizer_name} to its folder (Hugging Face), {self.vocab_size_name} to the number of its ids, "
            f"or {vocab_name} and {merge_name} (GPT-2)"
        )


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What is known of a vocabulary."""

    said_by: str
    """Who says so, for messages."""

    size: int | None
    """Number of ids; None if that cannot be told on this machine."""

    eod: int | None
    """The id that ends documents, where it is known."""

    megatron_args: tuple[str, ...]
    """The flags with which stock Megatron takes it."""

    identity: Mapping[str, str] = field(default_factory=dict)
    """What tells it from others, as far as it is known: `type` (bytes, or a tokenizer's folder), `folder` (the
    fingerprint of its files), and the digests of `Tokenizer.digests`."""

    def is_another(self, other: Vocabulary) -> bool:
        """Return whether both say which tokenizer they are, and it is not the same.

        A folder may have changed while its vocabulary did not, which its digests show.
        """
        shared = {name: self.identity[name] == other.identity[name] for name in self.identity.keys() & other.identity}
        if not shared.pop("type", True):
            return True
        is_same_folder = shared.pop("folder", None)
        return is_same_folder is not True and not all(shared.values() if shared else [is_same_folder is None])


def given_vocabulary(given: VocabularyConfig) -> Vocabulary | None:
    """Return the facts about the vocabulary that the user gives; None without one.

    Raises:
        UserError: It is not there, or none.
    """
    given.validate()
    if given.tokenizer is not None:
        return of_tokenizer(given.tokenizer, given.tokenizer_name)
    if given.vocab_size is not None:
        size = given.vocab_size
        args = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(size))
        return Vocabulary(said_by=f"{given.vocab_size_name} {size}", size=size, eod=size - 1, megatron_args=args)
    if given.vocab_file is None or given.merge_file is None:
        return None
    vocab_name, merge_name = given.files_names
    said_by = f"{vocab_name} {given.vocab_file}"
    ids = _vocabulary_file(given.vocab_file, said_by)
    _check_merges(given.merge_file, f"{merge_name} {given.merge_file}", ids, said_by)
    return Vocabulary(
        said_by=said_by,
        size=1 + max(ids.values()),
        eod=ids.get(_END_OF_TEXT),
        megatron_args=("--vocab-file", given.vocab_file, "--merge-file", given.merge_file),
        identity={"tokens": tokens_digest(ids)},
    )


def of_tokenizer(spec: TokenizerSpec, name: str, said_by: str = "") -> Vocabulary:
    """Return the facts about a tokenizer.

    Args:
        spec: The tokenizer: a folder, or a name of the hub, which may be in its cache.
        name: What it is given by.
        said_by: Who says so, for messages; `name` and the folder without.

    Raises:
        UserError: It is not a name of a hub, and not there.
    """
    said_by, args = said_by or f"{name} {spec.folder}", tuple(spec.megatron_args())
    here = spec
    if spec.folder is not None and not Path(spec.folder).exists():
        cached = _hub_cache(spec.folder)
        if cached is None and not _is_hub_name(spec.folder):
            raise UserError(
                f"{name} {spec.folder}: not a folder, nor a file; give the path of a tokenizer's folder, or a name of "
                "the hub such as org/model"
            )
        if cached is None:
            return Vocabulary(said_by=said_by, size=None, eod=None, megatron_args=args, identity={"type": "folder"})
        here = TokenizerSpec(folder=cached, trust_remote_code=spec.trust_remote_code)
    tokenizer = here.load(name)
    kind = "bytes" if spec.folder is None else "folder"
    identity = {"type": kind, "folder": here.fingerprint(name), **tokenizer.digests()}
    size, eod = tokenizer.vocab_size, tokenizer.eod
    return Vocabulary(said_by=said_by, size=size, eod=eod, megatron_args=args, identity=identity)


def folder_of(name: str, option: str) -> str:
    """Return the folder of a tokenizer that is named by it, or by a name of the hub. Nothing is downloaded.

    Args:
        name: As the user gives it.
        option: What it is given by, for messages.

    Raises:
        UserError: It is on this machine neither as a folder nor in the hub's cache.
    """
    if Path(name).exists():
        return name
    cached = _hub_cache(name)
    if cached is None:
        known = ", and not in the hub's cache" if _is_hub_name(name) else ""
        raise UserError(f"{option} {name}: not a folder{known}; give the path of a tokenizer's folder")
    return cached


def _is_hub_name(text: str) -> bool:
    """Return whether a text names something on the hub, not a path in a folder that is here."""
    return _HUB_NAME.fullmatch(text) is not None and not Path(text).parent.exists()


def _hub_cache(name: str) -> str | None:
    """Return the folder of the hub's cache with what is there of a name; None without. Nothing is downloaded."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        return None
    try:
        folder = Path(hub.snapshot_download(name, local_files_only=True))
    # No name, or not there.
    except (ValueError, hub.errors.LocalEntryNotFoundError):
        return None
    # Megatron may still get what the cache has not.
    return str(folder) if any(folder.glob("*tokenizer*")) else None


def _vocabulary_file(path: str, said_by: str) -> dict[str, int]:
    if not Path(path).exists():
        raise UserError(f"{said_by}: is not there; give the vocab.json of a GPT-2 vocabulary")
    try:
        ids = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{said_by}: is not a file of a GPT-2 vocabulary ({error}); give its vocab.json") from error
    if not isinstance(ids, dict) or not ids or not all(type(number) is int and number >= 0 for number in ids.values()):
        raise UserError(f"{said_by}: is not a file of a GPT-2 vocabulary (no tokens with ids); give its vocab.json")
    return ids


def _check_merges(path: str, said_by: str, ids: Mapping[str, int], vocabulary: str) -> None:
    """Refuse merges that are not there, or not of a vocabulary."""
    if not Path(path).exists():
        raise UserError(f"{said_by}: is not there; give the merges.txt of {vocabulary}")
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{said_by}: is not a file of merges ({error}); give the merges.txt of {vocabulary}") from error
    if not any(lines):
        raise UserError(f"{said_by}: is empty; give the merges.txt of {vocabulary}")
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2:
            raise UserError(
                f"{said_by}: line {number} is not two tokens, so it is not a file of merges; give the merges.txt of "
                f"{vocabulary}"
            )
        if not {parts[0], parts[1], "".join(parts)} <= ids.keys():
            raise UserError(
                f"{said_by}: line {number} has tokens that {vocabulary} has not; give the merges.txt of the same "
                "vocabulary"
            )
