# SPDX-License-Identifier: Apache-2.0
"""The record PREFIX.json of a corpus, as far as it names the vocabulary of the ids, checked field by field."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.output import SIDECAR_FAMILY, SIDECAR_FORMAT
from megatron_ext.data.tokenizers import TokenizerSpec
from megatron_ext.errors import UserError

__all__ = ["Record", "read_record"]

_HEAD_BYTES = 1 << 16
_BEGINNING = f'{{"format":"{SIDECAR_FAMILY}'.replace(" ", "").encode()
_KEY_OF_OURS = re.compile(rb'"format"\s*:\s*"' + SIDECAR_FAMILY.encode() + rb'|"megatron_args"\s*:')


@dataclass(frozen=True, kw_only=True)
class Record:
    """What `data prepare` has written of a corpus."""

    path: Path
    """Of the record itself."""

    tokenizer: TokenizerSpec
    """The corpus was made with it."""

    identity: dict[str, str]
    """What tells its tokenizer from others, as in `Vocabulary.identity`."""

    vocab_size: int
    """Number of ids."""

    eod: int
    """The id that ends documents."""

    largest_id: int | None
    """Of the tokens; None in records of before it was written down."""

    bytes: dict[str, int]
    """Of the files `bin` and `idx`."""

    digest: str | None
    """Of what they hold; None in records of before it was written down."""


def read_record(prefix: str, *, fix: str) -> Record | None:
    """Return the record of a corpus; None if `data prepare` did not make it, nor what its rows were padded from.

    Args:
        prefix: Of the corpus.
        fix: What can be done instead, as the end of a message.

    Raises:
        UserError: The record is of another release, cannot be read, or is damaged.
    """
    path = Path(f"{prefix}.json")
    if Path(prefix).name in ("", ".."):
        raise UserError(f"{prefix}: names no files; give what their names begin with, without .bin and .idx")
    fix = f"remove that file, and make the corpus again with megatron-ext data prepare, or {fix}"
    try:
        if not _is_ours(path):
            return None
        if not path.exists():
            raise UserError(f"{path}: is a link to {os.readlink(path)}, which is not there; {fix}")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {fix}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}), so that the record is damaged; {fix}") from error
    if not isinstance(content, dict) or content.get("format") != SIDECAR_FORMAT:
        raise UserError(f"{path}: format is not {SIDECAR_FORMAT!r}, that of this release's data prepare; {fix}")
    if "padded_from" in content and "tokenizer" not in content:
        return None
    fields = _Fields(content, path, fix)
    folder = fields.text("tokenizer.folder", may_be_null=True)
    return Record(
        path=path,
        tokenizer=TokenizerSpec(folder=folder, trust_remote_code=fields.flag("tokenizer.trust_remote_code")),
        identity=fields.identity(folder),
        vocab_size=fields.number("vocab_size", least=1),
        eod=fields.number("eod"),
        largest_id=fields.number("largest_id") if "largest_id" in content else None,
        bytes={suffix: fields.number(f"output_bytes.{suffix}") for suffix in ("bin", "idx")},
        digest=fields.text("output_digest") if "output_digest" in content else None,
    )


def _is_ours(path: Path) -> bool:
    """Return whether a file is a record, damaged or not, and not what a corpus may have been made of.

    Its head has a key that no such input has, or nothing in it says that it is not a record cut off (or of zeros, as
    after a crash). A link to nothing has lost one.

    Raises:
        OSError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return path.is_symlink()
    return _KEY_OF_OURS.search(head) is not None or _BEGINNING.startswith(head.translate(None, b" \t\r\n\0"))


class _Fields:
    """Takes values out of a record, or says which one is not what it has to be."""

    def __init__(self, content: dict[str, Any], path: Path, fix: str) -> None:
        self._content, self._path, self._fix = content, path, fix

    def _take(self, name: str, is_right: Callable[[Any], bool], what: str) -> Any:
        value: Any = self._content
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                raise UserError(f"{self._path}: {name} is missing, so that the record is damaged; {self._fix}")
            value = value[key]
        if not is_right(value):
            shown = ascii(value)
            shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
            raise UserError(f"{self._path}: {name} is {shown}, not {what}, so that the record is damaged; {self._fix}")
        return value

    def number(self, name: str, *, least: int = 0) -> int:
        value = self._take(name, lambda value: type(value) is int and value >= least, f"a whole number from {least}")
        return int(value)

    def flag(self, name: str) -> bool:
        return bool(self._take(name, lambda value: isinstance(value, bool), "true or false"))

    def text(self, name: str, *, may_be_null: bool = False) -> Any:
        """Return a text that is not empty."""

        def is_right(value: Any) -> bool:
            return (value is None and may_be_null) or (isinstance(value, str) and value != "")

        return self._take(name, is_right, "a text")

    def identity(self, folder: str | None) -> dict[str, str]:
        """Return the identity of the tokenizer."""
        found = {"type": "bytes" if folder is None else "folder", "folder": self.text("tokenizer.fingerprint")}
        if "tokenizer_digests" in self._content:
            for name in self._take("tokenizer_digests", lambda value: isinstance(value, dict), "an object"):
                found[name] = self.text(f"tokenizer_digests.{name}")
        return found
