# SPDX-License-Identifier: Apache-2.0
"""`patches/apply.sh`: puts a patch set into a fork, or takes it out again; all of it or nothing.

`git apply` does the work. This finds the set of the fork's release, and says what is in the way.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from megatron_ext.errors import UserError
from megatron_ext.fork.source import ForkSource

__all__ = ["apply", "main", "patch_of"]

SET_NAME = "hook_points.patch"

_State = Literal["in", "out", "rejected"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 2 where nothing can be done."""
    parser = argparse.ArgumentParser(
        prog="patches/apply.sh",
        description="Put the hook points of megatron_ext into a fork's source. Without --write nothing is changed.",
    )
    parser.add_argument("fork", type=Path, metavar="FORK_DIR", help="the folder that holds the fork's megatron/")
    parser.add_argument("--write", action="store_true", help="change the files; else only say what would change")
    parser.add_argument("--reverse", action="store_true", help="take the hook points out again")
    parser.add_argument(
        "--patch",
        type=Path,
        metavar="FILE",
        help="a set made for this fork by `megatron-ext patches --fork DIR --diff`, not one of patches/",
    )
    parser.add_argument("--sets", type=Path, required=True, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        source = ForkSource(options.fork.resolve())
        patch = options.patch.resolve() if options.patch else patch_of(source, options.sets)
        files = apply(source.folder, patch, reverse=options.reverse, write=options.write)
    except UserError as error:
        print(f"patches/apply.sh: error: {error}", file=sys.stderr)
        return 2
    verb = "took hook points out of" if options.reverse else "put hook points into"
    would = verb.replace("took", "would take").replace("put", "would put")
    lines = [f"Megatron {source.version}, {patch}: {verb if options.write else would} {len(files)} files"]
    lines += [f"  {file}" for file in files]
    lines += [] if options.write else ["nothing was changed; --write does it"]
    print("\n".join(lines))
    return 0


def patch_of(source: ForkSource, sets: Path) -> Path:
    """Return the patch set of a fork's release.

    Raises:
        UserError: there is none for it.
    """
    patch = sets.resolve() / f"core_v{source.version.major}.{source.version.minor}" / SET_NAME
    if not patch.is_file():
        there = ", ".join(sorted(path.parent.name for path in sets.glob(f"core_v*/{SET_NAME}")))
        raise UserError(
            f"{source.folder} is a fork of Megatron core {source.version}; there are sets for {there or 'no release'}. "
            f"`megatron-ext patches --fork {source.folder}` tells which seams fit it; with --diff it makes a set for it"
        )
    return patch


def apply(folder: Path, patch: Path, *, reverse: bool, write: bool) -> list[str]:
    """Put a set into the files of a folder, or take it out; return the files.

    Args:
        folder: absolute, holds `megatron/`.
        patch: absolute path of the set.
        reverse: take it out.
        write: change files; else only try.

    Raises:
        UserError: the set does not fit as a whole. Nothing was changed then.
    """
    if shutil.which("git") is None:
        raise UserError("git is not installed; its `git apply` does the work")
    try:
        hunks = _hunks(patch.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{patch}: {error.strerror}") from error
    if not hunks:
        raise UserError(f"{patch}: there is no diff in it")
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name).resolve()
        _copy_files(folder, copy, hunks)
        problem = _git_apply(copy, patch, reverse=reverse, check=True)
        if problem is not None:
            raise UserError(_explain(folder, copy, patch, hunks, problem, reverse))
        if write:
            problem = _git_apply(copy, patch, reverse=reverse, check=False)
            if problem is not None:
                raise UserError(f"{folder}: nothing was changed, git could not write: {problem}")
            _write(folder, copy, list(hunks))
    return list(hunks)


def _copy_files(folder: Path, copy: Path, files: Iterable[str]) -> None:
    """Copy what a set changes to where no repository's settings have git change line ends."""
    for file in files:
        if (folder / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file, copy / file)


def _hunks(text: str) -> dict[str, list[str]]:
    """Return by file the lines of its change, its hunk's header first."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^diff --git ", text, flags=re.MULTILINE)[1:]:
        name = part.split(" b/", 1)[0].removeprefix("a/")
        lines = part.splitlines()
        start = next((number for number, line in enumerate(lines) if line.startswith("@@")), len(lines))
        found[name] = lines[start:]
    return found


def _git_apply(folder: Path, patch: Path, *, reverse: bool, check: bool, file: str | None = None) -> str | None:
    """Run `git apply` in a folder; return what it said when it failed."""
    # Whatever line ends the user's settings have git check files out with, these keep theirs.
    settings = ["-c", "core.autocrlf=false", "-c", "core.attributesFile=/dev/null"]
    command = ["git", *settings, "apply", "--whitespace=nowarn"]
    command += ["--check"] * check + ["--reverse"] * reverse + ([f"--include={file}"] if file else [])
    # A repository around the folder would make git look for the paths at its top, and pass over all others.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(folder.parent), "LC_ALL": "C"}
    done = subprocess.run([*command, str(patch)], cwd=folder, env=environment, capture_output=True, text=True)
    return done.stderr.strip() or f"git apply ended with status {done.returncode}" if done.returncode else None


def _write(folder: Path, changed: Path, files: Sequence[str]) -> None:
    """Bring files to what they are in another folder, or put every one back as it was when that ends half-way."""
    before = {file: _content(folder / file) for file in files}
    try:
        for file in files:
            _set_content(folder / file, _content(changed / file))
    except OSError as error:
        for file, content in before.items():
            _set_content(folder / file, content)
        problem = f"{error.filename} cannot be written: {error.strerror}"
        raise UserError(f"{folder}: nothing was changed, {problem}") from error


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _set_content(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    elif _content(path) != content:
        path.write_bytes(content)


def _explain(folder: Path, copy: Path, patch: Path, hunks: dict[str, list[str]], problem: str, reverse: bool) -> str:
    """Return why a set cannot be put in or taken out of a folder, whose files are in `copy`, and the way out."""
    states = {file: _state(copy, patch, file) for file in hunks}
    inside = [file for file, state in states.items() if state == "in"]
    outside = [file for file, state in states.items() if state == "out"]
    rejected = [file for file, state in states.items() if state == "rejected"]
    if rejected:
        said = "\n".join(_rejected(copy / file, file, hunks[file], reverse) for file in rejected)
        way = (
            "take these lines out by hand, and the others with git"
            if reverse
            else "`megatron-ext patches --fork DIR --diff > FILE` makes a set for the files as they are; apply it with "
            "--patch FILE"
        )
        return f"{len(rejected)} of {len(hunks)} hunks of {patch} are rejected; nothing was changed\n{said}\n{way}"
    if inside and outside:
        odd, word = (inside, "with them") if len(inside) < len(outside) else (outside, "without them")
        return (
            f"{patch} is in {folder} by half: {len(inside)} of {len(hunks)} files have its hook points; nothing was "
            f"changed. Bring all files to one state first, with git; these are the ones {word}: {', '.join(odd)}"
        )
    if inside and not reverse:
        return f"{patch} is in {folder} already; --reverse takes it out"
    if outside and reverse:
        return f"{patch} is not in {folder}; there is nothing to take out"
    return f"{patch} does not apply to {folder}: {problem}"


def _state(folder: Path, patch: Path, file: str) -> _State:
    if _git_apply(folder, patch, reverse=False, check=True, file=file) is None:
        return "out"
    return "in" if _git_apply(folder, patch, reverse=True, check=True, file=file) is None else "rejected"


def _rejected(path: Path, file: str, hunk: Sequence[str], reverse: bool) -> str:
    added = [f"    {line[1:]}" for line in hunk if line.startswith("+")]
    context = next((line[1:] for line in hunk if line.startswith(" ")), None)
    if context is None:
        why = "differs from what was added" if reverse else "is there already and is another one"
    elif not reverse and path.is_file() and path.read_bytes().splitlines()[-1:] == [context.rstrip("\r").encode()]:
        why = f"ends its last line {context.strip()!r} otherwise (CRLF, LF, or not at all)"
    else:
        why = f"does not end with {'these lines' if reverse else f'the line {context.strip()!r}'}"
    return "\n".join([f"  {file} {hunk[0]}: it is missing, or {why}; the lines are", *added])


if __name__ == "__main__":
    sys.exit(main())
