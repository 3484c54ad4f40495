# SPDX-License-Identifier: Apache-2.0
"""Which seams fit a fork's source, and what differs where one does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from megatron_ext.fork.source import Definition, ForkSource, Missing
from megatron_ext.patching import Patch

__all__ = ["SeamFit", "fit", "seams_of_megatron"]

_DISTRIBUTION = "megatron-core"


@dataclass(frozen=True, kw_only=True)
class SeamFit:
    """Whether one patch finds its target in a fork."""

    patch: Patch
    """The record."""

    status: Literal["fits", "differs", "missing", "unavailable"]
    """`differs`: parameters that the patch needs are not there; `unavailable`: that release is known to lack it."""

    file: Path | None
    """Where the target is defined, relative to the fork; None when it is not."""

    line: int = 0
    """In that file, counted from 1."""

    problem: str | None = None
    """What is missing or differs; None when the seam fits."""

    elsewhere: tuple[Path, ...] = ()
    """Files that define something of the name, where the target is missing."""

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return {
            "name": self.patch.name,
            "target": self.patch.target,
            "parameters": list(self.patch.parameters),
            "reason": self.patch.reason,
            "status": self.status,
            "file": None if self.file is None else self.file.as_posix(),
            "line": self.line,
            "problem": self.problem,
            "elsewhere": [path.as_posix() for path in self.elsewhere],
        }


def seams_of_megatron(patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches whose target is in Megatron's own source."""
    return [patch for patch in patches if patch.distribution == _DISTRIBUTION]


def fit(source: ForkSource, patches: Sequence[Patch]) -> list[SeamFit]:
    """Look for the target of each of `patches` in a fork.

    Raises:
        UserError: a file that holds a target cannot be read.
    """
    return [_fit_one(source, patch) for patch in patches]


def _fit_one(source: ForkSource, patch: Patch) -> SeamFit:
    found = source.find(patch.module, patch.attribute)
    if isinstance(found, Missing):
        known = bool(patch.missing_from) and source.version in SpecifierSet(patch.missing_from, prereleases=True)
        return SeamFit(
            patch=patch,
            status="unavailable" if known else "missing",
            file=None,
            problem=found.what,
            elsewhere=tuple(source.elsewhere(patch.attribute)[:3]),
        )
    problem = _difference(patch, found)
    return SeamFit(
        patch=patch,
        status="differs" if problem else "fits",
        file=source.file_of(found.module),
        line=found.line,
        problem=problem,
    )


def _difference(patch: Patch, found: Definition) -> str | None:
    """Return which parameters the target lacks; what is not a function has none to compare."""
    if found.parameters is None:
        return None
    lacking = [name for name in patch.parameters if name not in found.parameters]
    if not lacking:
        return None
    return f"no parameter {', '.join(lacking)} (it has {', '.join(found.parameters) or 'none'})"
