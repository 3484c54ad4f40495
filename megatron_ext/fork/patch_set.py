# SPDX-License-Identifier: Apache-2.0
"""The diff with which a fork calls our wrappers itself: lines at the end of each module that holds a seam's target.

They name functions, and copy none: a hunk has one line of context, the last one of its file, and so applies wherever
that line still is the last.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.fork.seam_fit import fit
from megatron_ext.fork.source import Definition, ForkSource
from megatron_ext.patching import Patch

__all__ = ["ADDED_FILE", "declared", "diff"]

ADDED_FILE = Path("megatron", "core", "hook_points.py")
"""The one file that the set adds."""

_ADDED = '''\
"""Lets megatron_ext, where it is installed, wrap functions that modules declare in their last lines."""

try:
    from megatron_ext.patching.hook_points import declare
except ModuleNotFoundError as error:
    if error.name != "megatron_ext":
        raise

    def declare(namespace, *attributes):
        """Leave the functions as they are."""
'''
_IMPORT = "from megatron.core.hook_points import declare as _declare  # noqa: E402"
_COLUMNS = 100


def declared(source: ForkSource, patches: Sequence[Patch]) -> dict[Path, list[str]]:
    """Return by file what it is to declare, in the order of names.

    Raises:
        UserError: a file that holds a target cannot be read.
    """
    names: dict[Path, set[str]] = defaultdict(set)
    for entry in fit(source, [patch for patch in patches if patch.takes_hook_point]):
        place = source.find(entry.patch.module, entry.patch.attribute)
        if entry.status != "fits" or not isinstance(place, Definition) or place.parameters is None:
            continue
        is_inherited = "." in place.attribute and place.attribute != entry.patch.attribute
        if not is_inherited and entry.file is not None:
            names[entry.file].add(place.attribute)
    return {file: sorted(names[file]) for file in sorted(names)}


def diff(source: ForkSource, patches: Sequence[Patch]) -> str:
    """Return the patch set for a fork, as `git apply` takes it: lines end as those of the file that they go into.

    Raises:
        UserError: the fork has one already, or a file cannot be read.
    """
    if (source.folder / ADDED_FILE).exists():
        raise UserError(
            f"{source.folder} has {ADDED_FILE} already; take its hook points out first (patches/apply.sh --reverse)"
        )
    release = f"{source.version.major}.{source.version.minor}"
    head = [
        f"Hook points of megatron_ext for Megatron core {release}; patches/README.md says how to apply them.",
        "Made by `megatron-ext patches --fork DIR --diff`.",
        "",
    ]
    lines = [*head, *_new_file(ADDED_FILE, _ADDED.splitlines())]
    for file, names in declared(source, patches).items():
        text = (source.folder / file).read_bytes().decode("utf-8")  # read_text would make every line end LF
        lines += _appended(file, text, [_IMPORT, *_call(names)])
    return "\n".join(lines) + "\n"


def _call(names: Sequence[str]) -> list[str]:
    arguments = ", ".join(["globals()", *(f'"{name}"' for name in names)])
    line = f"_declare({arguments})"
    if len(line) <= _COLUMNS:
        return [line]
    indent = "    "
    return ["_declare(", *textwrap.wrap(arguments, _COLUMNS, initial_indent=indent, subsequent_indent=indent), ")"]


def _new_file(file: Path, lines: Sequence[str]) -> list[str]:
    name = file.as_posix()
    return [
        f"diff --git a/{name} b/{name}",
        "new file mode 100644",
        "--- /dev/null",
        f"+++ b/{name}",
        f"@@ -0,0 +1,{len(lines)} @@",
        *(f"+{line}" for line in lines),
    ]


def _appended(file: Path, text: str, lines: Sequence[str]) -> list[str]:
    """Return the change that adds lines at the end of a file, with ends as its last line has one."""
    name = file.as_posix()
    before = text.split("\n")
    end = "\r" if text[: text.rfind("\n") + 1].endswith("\r\n") else ""
    if text.endswith("\n"):
        before.pop()
        last = [f" {before[-1]}"]
    else:
        last = [f"-{before[-1]}", r"\ No newline at end of file", f"+{before[-1]}{end}"]
    return [
        f"diff --git a/{name} b/{name}",
        f"--- a/{name}",
        f"+++ b/{name}",
        f"@@ -{len(before)},1 +{len(before)},{1 + len(lines)} @@",
        *last,
        *(f"+{line}{end}" for line in lines),
    ]
