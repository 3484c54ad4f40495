# SPDX-License-Identifier: Apache-2.0
"""What installed packages add by entry points, and the registries of what is chosen by name.

A registry knows names without importing what they stand for: that happens when a run asks for one.
"""

from __future__ import annotations

import functools
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["Registry", "entries", "load", "origin_of"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
# Who repairs it: the message ends a run, and the user may not know that the package is there.
_WAY_OUT = "repair or uninstall that package"


def entries(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group in the order of their names, wherever Python finds packages now."""
    found = _all_entries(tuple(sys.path)).select(group=group)
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.value)))


@functools.lru_cache(maxsize=8)
def _all_entries(path: tuple[str, ...]) -> EntryPoints:
    """Return all entry points that packages on this path have: reading the files of all packages takes 40 ms."""
    return entry_points()


def origin_of(entry: EntryPoint) -> str:
    """Return in words who has brought an entry point."""
    return "a package" if entry.dist is None else f"package {entry.dist.name!r}"


def load[T](entry: EntryPoint, noun: str, problems: Callable[[Any], list[str]], use: Callable[[Any], T]) -> T:
    """Return what is made of an entry point's object.

    Args:
        entry: the entry point.
        noun: what it should be, for messages.
        problems: returns what keeps an object from being that, one sentence each.
        use: makes the result of an object without problems.

    Raises:
        UserError: it cannot be imported or used, by its name and that of its package.
    """
    where = f"the {noun} {entry.name!r} ({entry.value}) of {origin_of(entry)}"
    try:
        loaded = entry.load()
        found = problems(loaded)
        if not found:
            return use(loaded)
    # Whatever it is, the run cannot begin without what the user has asked for, and must not end in silence.
    except (Exception, SystemExit) as problem:
        said = " ".join(str(problem).split()) or "no further message"
        raise UserError(f"{where} cannot be loaded: {type(problem).__name__}: {said}; {_WAY_OUT}") from problem
    raise UserError(f"{where} cannot be used: {'; '.join(found)}; {_WAY_OUT}")


class Registry[T]:
    """Things of one kind by name: this package's own, and those that other packages have entry points for."""

    def __init__(
        self, noun: str, group: str, own: Mapping[str, str], problems: Callable[[str, Any], list[str]]
    ) -> None:
        """Take this package's own; nothing is imported.

        Args:
            noun: what they are, for messages.
            group: under which other packages name theirs.
            own: by name, the module and what is in it, as 'module:name'.
            problems: returns what keeps an object of another package from being one of that name, one sentence each.
        """
        self.group = group
        self._noun = noun
        self._own = dict(own)
        self._problems = problems
        self._loaded: dict[str, T] = {}
        self._others: dict[EntryPoint, T] = {}

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of this package's own, in their order."""
        return tuple(self._own)

    def names(self) -> tuple[str, ...]:
        """Return all names: this package's own in their order, then the others.

        Raises:
            UserError: two have one name, or one cannot be a name.
        """
        return (*self._own, *self._by_name())

    def find(self, name: str) -> T:
        """Return what a name stands for.

        Raises:
            UserError: nothing, or it cannot be loaded.
        """
        if name in self._loaded:
            return self._loaded[name]
        if name in self._own:
            found: T = pkgutil.resolve_name(self._own[name])
            self._loaded[name] = found
            return found
        entry = self._by_name().get(name)
        if entry is None:
            raise UserError(f"{self._noun} {name!r} is not known; use one of {', '.join(self.names())}")
        if entry not in self._others:
            self._others[entry] = load(entry, self._noun, lambda kind: self._problems(name, kind), lambda kind: kind)
        return self._others[entry]

    def package_of(self, name: str) -> str | None:
        """Return the other package that has brought a name, with its version; None for this package's own."""
        entry = None if name in self._own else self._by_name().get(name)
        return None if entry is None or entry.dist is None else f"{entry.dist.name} {entry.dist.version}"

    def packages(self) -> dict[str, str]:
        """Return by name the other package that has brought it, with its version; an empty text for our own."""
        return {name: self.package_of(name) or "" for name in self.names()}

    def _by_name(self) -> dict[str, EntryPoint]:
        """Return the entry points of other packages."""
        found: dict[str, EntryPoint] = {}
        for entry in entries(self.group):
            if not _NAME.fullmatch(entry.name):
                raise UserError(
                    f"{origin_of(entry)} has a {self._noun} named {entry.name!r}; a name has small letters, digits, "
                    f"'_' and '-' only; {_WAY_OUT}"
                )
            if entry.name in self._own or entry.name in found:
                before = "megatron_ext" if entry.name in self._own else origin_of(found[entry.name])
                raise UserError(
                    f"{origin_of(entry)} and {before} both have a {self._noun} named {entry.name!r}; uninstall one, or "
                    "rename it"
                )
            found[entry.name] = entry
        return found
