# SPDX-License-Identifier: Apache-2.0
"""Looks at every file before the first one is read: what it holds, and whether all of them can be read."""

from __future__ import annotations

import glob
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.data.content import Content, Unread, content_of
from megatron_ext.data.discover import Inventory, SourceFile, matches
from megatron_ext.data.documents import Problem, location
from megatron_ext.errors import UserError

__all__ = ["Survey", "UnreadFile", "refuse_unread", "survey"]

_NAMED_FILES = 3
_ADVISED_PATTERNS = 4
_TRIED_PATTERNS = 40
"""Each is tried on every file that is read, of which there may be a million."""

_NAMES = {
    "binary": ("binary file", "binary files"),
    "archive": ("archive", "archives"),
    "ids": ("file of numbers (.npy)", "files of numbers (.npy)"),
    "encoding": ("file in UTF-16 or UTF-32", "files in UTF-16 or UTF-32"),
    "compression": ("damaged compressed file", "damaged compressed files"),
    "packed": ("file compressed in a way that is not read", "files compressed in ways that are not read"),
    "length": ("text too long for one document", "texts too long for one document"),
    "strings": ("JSON array of strings", "JSON arrays of strings"),
    "markup": ("table or document in markup", "tables or documents in markup (CSV, HTML, PDF, ...)"),
    "json": ("file that is not JSON", "files that are not JSON"),
    "record": ("JSON file with a very long record", "JSON files with very long records"),
    "twice": ("file compressed twice", "files compressed twice"),
    "unreadable": ("unreadable file or folder", "unreadable files or folders"),
    "special": ("device, pipe or socket", "devices, pipes or sockets"),
}
"""Why files are not read, as one and as several of them are called."""

_WAYS_OUT = {
    "ids": "--format tokens reads token ids",
    "encoding": "convert to UTF-8",
    "packed": "decompress, or pack again with gzip, bzip2, xz or zstd",
    "length": "write one JSON line per document, --format jsonl",
    "strings": "--format json takes each string as a document, --format text each file",
    "markup": "--format text takes each file as one text",
    "json": "--format text takes each file as one text, --format jsonl reads lines",
    "record": "--format json reads it all the same",
    "twice": "unpack once",
}
"""How files can be read nevertheless, where there is a way."""


@dataclass(frozen=True, kw_only=True)
class UnreadFile:
    """A file, or a folder, of the input that is not read."""

    kind: str
    """A key of `_NAMES`."""

    path: str
    """Where it is."""

    name: str = ""
    """Path inside the input folder, where it is known."""

    message: str
    """Why, and what to do."""

    named: bool = False
    """Whether the user gave this very file, which no pattern leaves out."""

    def __str__(self) -> str:
        """Return `file: message`."""
        return str(Problem(path=self.path, position="", message=self.message))


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found."""

    contents: list[Content | Unread | None]
    """Of each of the inventory's files in order; None for an empty one."""

    unread: list[UnreadFile]
    """What is not read, in order; empty files have nothing to read."""

    empty: list[Problem]
    """Empty files, in order."""


def survey(inventory: Inventory) -> Survey:
    """Look at the first bytes of every file.

    Raises:
        UserError: A file needs a package that is not installed.
    """
    unread = [UnreadFile(kind="unreadable", path=item.path, message=item.message) for item in inventory.problems]
    unread += [UnreadFile(kind="special", path=item.path, message=item.message) for item in inventory.special]
    contents: list[Content | Unread | None] = []
    for source in inventory.files:
        content = content_of(source) if source.size else None
        contents.append(content)
        if isinstance(content, Unread):
            path = str(source.path)
            unread.append(
                UnreadFile(
                    kind=content.kind, path=path, name=source.name, message=content.message, named=source.named
                )
            )
    empty = [
        Problem(path=str(source.path), position="", message="empty file")
        for source in inventory.files
        if not source.size
    ]
    return Survey(contents=contents, unread=unread, empty=empty)


def refuse_unread(seen: Survey, inventory: Inventory) -> None:
    """Refuse an input of which something is not read.

    Args:
        seen: What was found.
        inventory: The files, of which the advice leaves all the others in.

    Raises:
        UserError: Names it; groups and their first files where there is more than one.
    """
    unread = seen.unread
    if not unread:
        return
    read = [
        source
        for source, content in zip(inventory.files, seen.contents, strict=True)
        if not isinstance(content, Unread)
    ]
    how = _how_to_leave_out(unread, read)
    if len(unread) == 1:
        raise UserError(f"{unread[0]}; repair or leave out the input{how}, or use --on-error skip")
    groups: dict[str, list[str]] = {}
    for file in unread:
        groups.setdefault(file.kind, []).append(location(file.path, ""))
    told = "; ".join(_group(kind, paths) for kind, paths in groups.items())
    raise UserError(
        f"{len(unread):,} of the input's files are not read: {told}; leave them out{how}, or "
        "use --on-error skip, which leaves out all that is unusable (--verbose names every one)"
    )


def _group(kind: str, paths: list[str]) -> str:
    one, several = _NAMES[kind]
    shown = ", ".join(paths[:_NAMED_FILES]) + (", ..." if len(paths) > _NAMED_FILES else "")
    advice = f": {_WAYS_OUT[kind]}" if kind in _WAYS_OUT else ""
    return f"{len(paths):,} {one if len(paths) == 1 else several} ({shown}){advice}"


def _how_to_leave_out(unread: Sequence[UnreadFile], read: Sequence[SourceFile]) -> str:
    """Return the options that leave most of the files in folders out, and none of those that are read."""
    counts: Counter[str] = Counter()
    unnamed = False
    readable = [(source.name.rsplit("/", 1)[-1], source.name) for source in read if not source.named]
    safe: dict[str, bool] = {}
    for file in unread:
        if file.named:
            continue
        for pattern in _patterns(file):
            if pattern not in safe and len(safe) < _TRIED_PATTERNS:
                safe[pattern] = not any(matches(base, name, pattern) for base, name in readable)
            if safe.get(pattern):
                counts[pattern] += 1
                break
        else:
            unnamed = True
    if not counts:
        return ""
    patterns = [location(pattern, "") for pattern, _ in counts.most_common(_ADVISED_PATTERNS)]
    more = ", ..." if unnamed or len(counts) > _ADVISED_PATTERNS else ""
    return f" ({' '.join(f'--exclude {shlex.quote(pattern)}' for pattern in patterns)}{more})"


def _patterns(file: UnreadFile) -> list[str]:
    """Return patterns that a file has, from one for many files to one for it alone."""
    path = Path(file.path)
    patterns = [f"*{path.suffix}"] if path.suffix else []
    patterns.append(glob.escape(path.name))
    if file.name:
        patterns.append("/" + glob.escape(file.name))
    return patterns
