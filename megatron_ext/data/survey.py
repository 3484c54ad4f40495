# SPDX-License-Identifier: Apache-2.0
"""Looks at every file before the first one is read: what it holds, and whether all of them can be read."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.data.content import Content, Unread, content_of
from megatron_ext.data.discover import Inventory
from megatron_ext.data.documents import Problem, location
from megatron_ext.errors import UserError

__all__ = ["Survey", "UnreadFile", "refuse_unread", "survey"]

_NAMED_FILES = 3
_ADVISED_PATTERNS = 4

_NAMES = {
    "binary": ("binary file", "binary files"),
    "archive": ("archive", "archives"),
    "encoding": ("file in UTF-16 or UTF-32", "files in UTF-16 or UTF-32"),
    "compression": ("damaged compressed file", "damaged compressed files"),
    "length": ("text too long for one document", "texts too long for one document"),
    "strings": ("JSON array of strings", "JSON arrays of strings"),
    "json": ("file that is no JSON", "files that are no JSON"),
    "record": ("JSON file with a very long record", "JSON files with very long records"),
    "twice": ("file compressed twice", "files compressed twice"),
    "unreadable": ("unreadable file or folder", "unreadable files or folders"),
    "special": ("device, pipe or socket", "devices, pipes or sockets"),
}
"""Why files are not read, as one and as several of them are called."""


@dataclass(frozen=True, kw_only=True)
class UnreadFile:
    """A file, or a folder, of the input that is not read."""

    kind: str
    """A key of `_NAMES`."""

    path: str
    """Where it is."""

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
            unread.append(UnreadFile(kind=content.kind, path=path, message=content.message, named=source.named))
    return Survey(contents=contents, unread=unread)


def refuse_unread(unread: Sequence[UnreadFile]) -> None:
    """Refuse an input of which something is not read.

    Raises:
        UserError: Names it; groups and their first files where there is more than one.
    """
    if not unread:
        return
    if len(unread) == 1:
        raise UserError(f"{unread[0]}; mend or leave out the input{_how_to_leave_out(unread)}, or use --on-error skip")
    groups: dict[str, list[str]] = {}
    for file in unread:
        groups.setdefault(file.kind, []).append(location(file.path, ""))
    told = "; ".join(_group(kind, paths) for kind, paths in groups.items())
    raise UserError(
        f"{len(unread):,} of the input's files are not read: {told}; leave them out{_how_to_leave_out(unread)}, or "
        "use --on-error skip, which leaves out all that is unusable (--verbose names every one)"
    )


def _group(kind: str, paths: list[str]) -> str:
    one, several = _NAMES[kind]
    shown = ", ".join(paths[:_NAMED_FILES]) + (", ..." if len(paths) > _NAMED_FILES else "")
    return f"{len(paths):,} {one if len(paths) == 1 else several} ({shown})"


def _how_to_leave_out(unread: Sequence[UnreadFile]) -> str:
    """Return the options that leave most of the files in folders out."""
    paths = [Path(file.path) for file in unread if not file.named]
    counts = Counter(f"*{path.suffix}" if path.suffix else path.name for path in paths)
    if not counts:
        return ""
    patterns = [location(pattern, "") for pattern, _ in counts.most_common(_ADVISED_PATTERNS)]
    more = ", ..." if len(counts) > _ADVISED_PATTERNS else ""
    return f" ({' '.join(f'--exclude {shlex.quote(pattern)}' for pattern in patterns)}{more})"
