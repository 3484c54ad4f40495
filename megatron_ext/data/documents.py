# SPDX-License-Identifier: Apache-2.0
"""What flows through the pipeline: documents, and the reasons why something is not one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ID_TYPES",
    "MAX_DOCUMENT_BYTES",
    "ONE_TEXT",
    "Document",
    "Item",
    "Problem",
    "Skipped",
    "TokenizedDocument",
    "location",
]

ID_TYPES = ("uint16", "uint32", "uint64", "int32", "int64")
"""Types of a token id in files of ids, little-endian."""

MAX_DOCUMENT_BYTES = 2**31 - 1024
"""Longest document, in bytes of UTF-8. The index file counts a document's tokens in 32 bits; a tokenizer
yields at most one token per byte, plus a few special ones."""

ONE_TEXT = "--format text takes each file as one text"
"""The way out in a message about JSON that holds no records."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document as found in its file, not yet checked or decoded."""

    path: str
    """The file, as error messages name it."""

    position: str
    """Place inside the file: `line 7`, `row 7`, or empty when the file is the document."""

    payload: bytes | str
    """Bytes of a text file or of a JSON line; a `str` is a text that needs no decoding (Parquet)."""

    is_json: bool
    """Whether `payload` is a JSON object that holds the text under a key."""

    source_bytes: int
    """Bytes of the file (compressed ones where it is compressed) that this document accounts for."""


@dataclass(frozen=True, kw_only=True)
class TokenizedDocument:
    """One document that is token ids already."""

    path: str
    """The file, as error messages name it."""

    position: str
    """Place inside the file: `document 7`."""

    ids: NDArray[Any]
    """1-D integers of any type, mostly with the end-of-document id; not yet checked."""

    source_bytes: int
    """Bytes of the file that this document accounts for."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Bad input: an error, or a counted and listed omission with `--on-error skip`."""

    path: str
    position: str
    message: str

    def __str__(self) -> str:
        """Return `file:line: message`."""
        return f"{location(self.path, self.position)}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Something left out on purpose, which is never an error: it is only counted."""

    reason: Literal["binary file", "empty file", "empty document"]
    path: str


Item = Document | TokenizedDocument | Problem | Skipped
"""What a reader yields."""


def location(path: str, position: str) -> str:
    """Return `path:7` for a line, `path (row 7)` for any other position, `path` for the whole file."""
    # A file name need not be valid UTF-8; a message has to be, or it could not be printed.
    decoded = os.fsencode(path).decode("utf-8", errors="backslashreplace")
    # One message is one line, whatever the file's name is.
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in decoded)
    if not position:
        return shown
    kind, _, number = position.partition(" ")
    return f"{shown}:{number}" if kind == "line" else f"{shown} ({position})"
