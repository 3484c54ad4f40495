# SPDX-License-Identifier: Apache-2.0
"""Which files belong to the corpus, in an order that is the same on every machine."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shlex
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_ext.data.compression import uncompressed_name
from megatron_ext.data.documents import Problem
from megatron_ext.data.output import has_sidecar
from megatron_ext.errors import UserError

__all__ = ["FileFormat", "Inventory", "SourceFile", "find_sources", "matches"]

FileFormat = Literal["text", "jsonl", "json", "parquet", "arrow", "tokens"]

_FORMAT_OF_SUFFIX: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".jsonlines": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of the corpus."""

    path: Path
    """Where to read it."""

    name: str
    """Path relative to the folder it was found in, with `/`; the file's own name if it was given itself."""

    format: FileFormat
    """How to read it if the user has chosen that; else what its name promises, `text` where it promises nothing."""

    chosen: bool
    """Whether the user has chosen the format; else the file's content decides."""

    named: bool
    """Whether the user gave this very file, so that leaving it out silently would be wrong."""

    size: int
    """Bytes on disk."""

    mtime_ns: int
    """Modification time in nanoseconds."""

    ctime_ns: int
    """When it or what is known of it last changed, in nanoseconds; it cannot be set back."""


@dataclass(kw_only=True)
class Inventory:
    """All files of the corpus and what was left out."""

    files: list[SourceFile] = field(default_factory=list)
    """In reading order: inputs as given, inside a folder sorted by the bytes of the relative path."""

    left_out: list[Problem] = field(default_factory=list)
    """Files and folders that are not looked at, each with the reason."""

    problems: list[Problem] = field(default_factory=list)
    """Links that lead nowhere, folders that cannot be listed."""

    special: list[Problem] = field(default_factory=list)
    """Devices, pipes and sockets."""

    matched: set[str] = field(default_factory=set)
    """Patterns of `excludes` that are those of a file or folder."""

    def leave_out(self, path: Path, reason: str) -> None:
        """Name a file or folder that is not looked at."""
        self.left_out.append(Problem(path=str(path), position="", message=reason))

    @property
    def skipped(self) -> Counter[str]:
        """Reason -> number of files or folders not looked at."""
        counts = Counter(item.message for item in self.left_out)
        if self.special:
            counts["device, pipe or socket"] = len(self.special)
        return counts

    @property
    def total_bytes(self) -> int:
        """Bytes on disk of all files."""
        return sum(source.size for source in self.files)

    def digest(self) -> str:
        """Return the SHA-256 over every file's name, format, size, modification and change time, in order.

        Contents are not read, so that asking whether a corpus is up to date costs one `stat` per file. Archives set
        modification times to what they like; the change time tells such files apart.
        """
        digest = hashlib.sha256()
        for source in self.files:
            name = os.fsencode(source.name)
            digest.update(b"%d %s %s %d %d %d\n" % (
                len(name), name, source.format.encode(), source.size, source.mtime_ns, source.ctime_ns
            ))  # fmt: skip
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Filter:
    globs: Sequence[str]
    excludes: Sequence[str]
    own_outputs: frozenset[Path]
    matched: set[str]

    def reason_to_skip(self, path: Path, name: str, *, is_folder: bool) -> str | None:
        base = name.rsplit("/", 1)[-1]
        excluding = [pattern for pattern in self.excludes if matches(base, name, pattern)]
        self.matched.update(excluding)
        if base.startswith("."):
            return "hidden"
        is_output_name = any(output.name == base for output in self.own_outputs)
        if is_output_name and path.resolve() in self.own_outputs:
            return "output of this command"
        if path.suffix == ".json" and _is_description(path):
            return "description of another corpus"
        if excluding:
            return "excluded"
        if not is_folder and self.globs and not any(matches(base, name, p) for p in self.globs):
            return "not matching --glob"
        return None


def _is_description(path: Path) -> bool:
    """Return whether a .json file describes the corpus next to it, and is not what the corpus was made of."""
    is_beside_corpus = path.with_suffix(".bin").exists() and path.with_suffix(".idx").exists()
    return is_beside_corpus and path.is_file() and has_sidecar(path.with_suffix(""))


def find_sources(
    inputs: Sequence[Path],
    *,
    globs: Sequence[str] = (),
    excludes: Sequence[str] = (),
    file_format: FileFormat | Literal["auto"] = "auto",
    own_outputs: frozenset[Path] = frozenset(),
) -> Inventory:
    """List the files of the corpus.

    Folders are walked in full; hidden entries, devices, pipes and sockets are left out. Links are followed,
    but each real folder is entered once per input, so that a loop of links ends, and a file that links give
    several names is taken once: under the first name that tells its format, else the first. Files that are
    named themselves are taken whatever their name and the patterns.

    Args:
        inputs: Files and folders, in reading order.
        globs: File-name patterns; without a `/` they are matched against the name, with one against the path
            relative to the input folder, where `*` crosses `/` and `**/` may be nothing. Empty means every file.
        excludes: Patterns of files and folders to leave out, matched in the same way.
        file_format: How the user wants all files to be read; `auto` leaves that to their content.
        own_outputs: Resolved paths that this command writes, never read back as input.

    Raises:
        UserError: An input does not exist, is not a file or folder, or lies inside another input.
    """
    _refuse_overlap(inputs)
    inventory = Inventory()
    patterns = _Filter(globs=globs, excludes=excludes, own_outputs=own_outputs, matched=inventory.matched)
    for given in inputs:
        try:
            status = given.stat()
        except OSError as error:
            raise UserError(f"input {given}: {error.strerror}; {_instead_of(given)}") from error
        if stat.S_ISDIR(status.st_mode):
            inventory.files.extend(_walk(given, patterns, file_format, inventory))
        elif stat.S_ISREG(status.st_mode):
            inventory.files.append(_source(given, given.name, status, file_format, named=True))
        else:
            raise UserError(f"input {given}: neither a regular file nor a folder")
    _drop_repeats(inventory)
    return inventory


def _instead_of(missing: Path) -> str:
    """Return what to do about an input that is not there, which may be a pattern that the shell has left as it was."""
    parts = missing.parts
    first = next((number for number, part in enumerate(parts) if any(sign in part for sign in "*?[")), None)
    if first is None:
        return "check the path"
    folder, pattern = Path(*parts[:first]), "/".join(parts[first:])
    pattern = f"/{pattern}" if "/" in pattern else pattern
    return f"no file has such a name; of a folder's files --glob chooses: {folder} --glob {shlex.quote(pattern)}"


def _refuse_overlap(inputs: Sequence[Path]) -> None:
    """Refuse inputs that would put the same file into the corpus twice."""
    given: dict[Path, Path] = {}
    for path in inputs:
        resolved = path.resolve()
        if resolved in given:
            raise _given_twice(path, given[resolved])
        given[resolved] = path
    for resolved, path in given.items():
        for folder in resolved.parents:
            if folder in given:
                raise _given_twice(path, given[folder])


def _given_twice(path: Path, other: Path) -> UserError:
    return UserError(f"input {path} is given twice: it is, or lies in, {other}; leave one of them out")


def _walk(
    root: Path, patterns: _Filter, file_format: FileFormat | Literal["auto"], inventory: Inventory
) -> list[SourceFile]:
    """Return the files below `root`, sorted; counts and problems go to `inventory`."""
    found: list[SourceFile] = []
    entered: set[tuple[int, int]] = set()
    waiting = [(root, "")]
    while waiting:
        folder, prefix = waiting.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in entered:
                inventory.leave_out(folder, "folder already read through another link")
                continue
            entered.add((status.st_dev, status.st_ino))
            entries = sorted(os.listdir(folder))
        except OSError as error:
            inventory.problems.append(
                Problem(path=str(folder), position="", message=f"cannot list folder: {error.strerror}")
            )
            continue
        for base in entries:
            path, name = folder / base, prefix + base
            try:
                status = path.stat()
            except OSError as error:
                reason = patterns.reason_to_skip(path, name, is_folder=False)
                if reason is not None:
                    inventory.leave_out(path, reason)
                else:
                    inventory.problems.append(
                        Problem(path=str(path), position="", message=f"cannot read: {error.strerror}")
                    )
                continue
            is_folder = stat.S_ISDIR(status.st_mode)
            reason = patterns.reason_to_skip(path, name, is_folder=is_folder)
            if reason is not None:
                inventory.leave_out(path, reason)
            elif is_folder:
                waiting.append((path, name + "/"))
            elif stat.S_ISREG(status.st_mode):
                found.append(_source(path, name, status, file_format, named=False))
            else:
                message = "a device, pipe or socket, which is not read"
                inventory.special.append(Problem(path=str(path), position="", message=message))
    return sorted(found, key=lambda source: os.fsencode(source.name))


def _drop_repeats(inventory: Inventory) -> None:
    """Leave each real file once, as in a cache that keeps files by their hashes next to links with their names."""
    by_file: dict[str, list[SourceFile]] = {}
    for source in inventory.files:
        by_file.setdefault(os.path.realpath(source.path), []).append(source)
    kept = {min(names, key=lambda source: (not source.named, source.format == "text")) for names in by_file.values()}
    for source in inventory.files:
        if source not in kept:
            inventory.leave_out(source.path, "file already read under another name")
    inventory.files = [source for source in inventory.files if source in kept]


def _source(
    path: Path,
    name: str,
    status: os.stat_result,
    file_format: FileFormat | Literal["auto"],
    *,
    named: bool,
) -> SourceFile:
    return SourceFile(
        path=path,
        name=name,
        format=_format_of(name) if file_format == "auto" else file_format,
        chosen=file_format != "auto",
        named=named,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
    )


def _format_of(name: str) -> FileFormat:
    suffix = os.path.splitext(uncompressed_name(name))[1]
    return _FORMAT_OF_SUFFIX.get(suffix, "text")


def matches(base: str, name: str, pattern: str) -> bool:
    """Return whether a pattern of --glob or --exclude is that of a file or folder.

    Args:
        base: Its name.
        name: Its path inside the input folder.
        pattern: Without a `/` matched against the name, with one against the path, from the folder's top on.
    """
    if "/" not in pattern:
        return fnmatch.fnmatchcase(base, pattern)
    pattern = pattern.removeprefix("/")
    # As in shells and .gitignore, `**/` is any number of folders, or none.
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.replace("**/", ""))
