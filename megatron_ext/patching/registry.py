# SPDX-License-Identifier: Apache-2.0
"""Applying patches, undoing them by identity, and explaining them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_ext.patching import gates
from megatron_ext.patching.hook_points import HookPoint, hook_point_of
from megatron_ext.patching.patch import Patch, PatchError, PatchStatus, SeamUnavailable

__all__ = ["PatchRegistry"]

# Modules in which a copy of a patched function is replaced: Megatron itself, the scripts that drive it, and the
# package that publishes torch's collectives.
_SCRIPT_PREFIXES = ("__main__", "gpt_builders", "model_provider", "pretrain_")
_COPY_PREFIXES = ("megatron.", *_SCRIPT_PREFIXES)
_COPY_MODULES = ("megatron", "torch.distributed")
_NEVER_PATCHED = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict, ModuleType})
_ABSENT = object()


@dataclass(frozen=True)
class _Applied:
    patch: Patch
    owner: Any
    name: str
    original: Any
    """The raw attribute as it stood in the owner's `__dict__`, or _ABSENT when it was inherited."""
    replacement: Any
    copies: tuple[tuple[ModuleType, str, Any, Any], ...]
    """(module, name, original, replacement) of every copy that was rebound."""
    point: HookPoint | None = None
    """Through which a fork calls the target itself; then `original` and `replacement` are what it runs."""


class PatchRegistry:
    """The patches in force in this process, in the order in which they were applied."""

    def __init__(self) -> None:
        self._applied: list[_Applied] = []
        self._globals = _Globals()

    @property
    def applied(self) -> tuple[Patch, ...]:
        """The patches in force, oldest first."""
        return tuple(record.patch for record in self._applied)

    def apply(self, patches: Iterable[Patch]) -> None:
        """Apply `patches` in order; one that is in force already is left alone.

        Every gate of every patch is passed before the first one is applied, so a failure changes nothing.

        Raises:
            PatchError: a patch does not fit, or two different patches have one name.
        """
        fresh: list[Patch] = []
        for patch in patches:
            known = next((p for p in [*self.applied, *fresh] if p.name == patch.name), None)
            if known is None:
                fresh.append(patch)
            elif known != patch:
                raise PatchError(f"{patch.describe()}: another patch of that name targets {known.target}")
        fresh = [patch for patch in fresh if _is_there(patch)]
        self._globals.read_all()
        for count, patch in enumerate(fresh):
            try:
                self._applied.append(_apply_one(patch, self._globals))
            except BaseException:  # Ctrl-C too: all patches are there, or none
                self.revert([done.name for done in fresh[:count]])
                raise

    def revert(self, names: Iterable[str] | None = None) -> None:
        """Undo the named patches (all when None), newest first, restoring the very objects that stood there.

        Raises:
            PatchError: someone else replaced a target after us; nothing further is undone.
            KeyError: a name is not in force.
        """
        wanted = {record.patch.name for record in self._applied} if names is None else set(names)
        unknown = wanted - {record.patch.name for record in self._applied}
        if unknown:
            raise KeyError(f"not applied: {', '.join(sorted(unknown))}")
        for record in reversed(tuple(self._applied)):
            if record.patch.name in wanted:
                _revert_one(record)
                self._applied.remove(record)
        self._globals = _Globals()

    def explain(self, patches: Iterable[Patch]) -> list[PatchStatus]:
        """Return the status of each of `patches` against the installed packages."""
        records = {record.patch.name: record for record in self._applied}
        statuses = []
        for patch in patches:
            record = records.get(patch.name)
            problem, unavailable = None, False
            if record is None:
                try:
                    gates.check(patch)
                except PatchError as error:
                    problem, unavailable = str(error), isinstance(error, SeamUnavailable)
            rebound = (
                tuple(f"{module.__name__}.{name}" for module, name, _, _ in record.copies) if record else ()
            )
            statuses.append(
                PatchStatus(
                    patch=patch,
                    applied=record is not None,
                    problem=problem,
                    unavailable=unavailable,
                    rebound=rebound,
                    hook_point=record.point is not None if record else problem is None and _is_hook_point(patch),
                )
            )
        return statuses


def _apply_one(patch: Patch, globals_: _Globals) -> _Applied:
    owner, name, raw = gates.check(patch)
    point = _point(patch, owner, name, raw)
    if point is not None:
        return _apply_at(point, patch, owner, name, globals_)
    original = vars(owner).get(name, _ABSENT)
    if isinstance(raw, (staticmethod, classmethod)):
        replacement: Any = type(raw)(patch.wrap(raw.__func__))
    else:
        replacement = patch.wrap(raw)
    setattr(owner, name, replacement)
    copies = _rebind_copies(raw, replacement, owner, name, globals_) if patch.rebind else ()
    return _Applied(patch, owner, name, original, replacement, copies)


def _point(patch: Patch, owner: Any, name: str, raw: Any) -> HookPoint | None:
    """Return the hook point of a target, if it is to be patched there.

    It is not where copies must not follow, so that the name in one module is bound instead, and where a class inherits
    the target, so that other classes would follow.
    """
    if name not in vars(owner) or not patch.takes_hook_point:
        return None
    return hook_point_of(raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw)


def _is_hook_point(patch: Patch) -> bool:
    return _point(patch, *gates.locate(patch)) is not None


def _apply_at(point: HookPoint, patch: Patch, owner: Any, name: str, globals_: _Globals) -> _Applied:
    original = point.current
    replacement = patch.wrap(original)
    point.current = replacement
    # Modules that are imported in a circle took their copies before the hook point was declared.
    early = _rebind_copies(point.original, point.call, owner, name, globals_) if patch.rebind else ()
    return _Applied(patch, owner, name, original, replacement, early, point)


def _rebind_copies(
    raw: Any, replacement: Any, owner: Any, name: str, globals_: _Globals
) -> tuple[tuple[ModuleType, str, Any, Any], ...]:
    """Replace every global that is the original itself, whatever it is called there."""
    found = []
    for module, key in globals_.holding(raw):
        if not (module is owner and key == name):
            setattr(module, key, replacement)
            found.append((module, key, raw, replacement))
    globals_.replaced(raw, replacement)
    return tuple(found)


class _Globals:
    """Where objects are found among the globals of modules that may hold copies; read once, not for every patch."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[ModuleType, str]]] = {}
        self._sizes: dict[str, int] = {}
        """By module that may hold copies, how many globals it had when it was read."""
        self._modules = 0
        """How many modules there were, of whatever name, when they were last looked through."""
        self._newest: str | None = None
        """The last of them."""

    def holding(self, value: Any) -> list[tuple[ModuleType, str]]:
        """Return (module, name) of every global that is this very object."""
        self._read(self._new_names())  # a wrapper may have imported something
        places = dict.fromkeys(self._places.get(id(value), []))
        return [(module, key) for module, key in places if vars(module).get(key) is value]

    def replaced(self, value: Any, replacement: Any) -> None:
        """Take note that the globals that were `value` are `replacement` now."""
        self._places[id(replacement)] = self._places.pop(id(value), [])

    def read_all(self) -> None:
        """Read the modules that are new or have got other globals, and the user's scripts."""
        self._read((*self._sizes, *self._new_names()))

    def _new_names(self) -> tuple[str, ...]:
        """Return the modules since the last call, newest first, and all of them where others have gone since.

        Megatron with its libraries has thousands: to look at each for every patch takes longer than to patch.
        """
        count = len(sys.modules)
        # In one call, so that no other thread imports meanwhile.
        names = tuple(itertools.islice(reversed(sys.modules), max(0, count - self._modules) + 1))
        new = names[:-1] if names[-1] == self._newest else tuple(reversed(sys.modules))
        self._modules, self._newest = count, names[0]
        return new

    def _read(self, names: tuple[str, ...]) -> None:
        for name in names:
            if not name.startswith(_COPY_PREFIXES) and name not in _COPY_MODULES:
                continue
            module = sys.modules.get(name)
            if not isinstance(module, ModuleType):
                continue
            if self._sizes.get(name) == len(vars(module)) and not name.startswith(_SCRIPT_PREFIXES):
                continue
            self._sizes[name] = len(vars(module))
            for key, value in tuple(vars(module).items()):
                if type(value) not in _NEVER_PATCHED:
                    self._places.setdefault(id(value), []).append((module, key))


def _is_there(patch: Patch) -> bool:
    """Pass every gate of a patch; False where the installed release does without it.

    Raises:
        PatchError: it does not fit.
    """
    try:
        gates.check(patch)
    except SeamUnavailable:
        if not patch.dispensable:
            raise
        return False
    return True


def _revert_one(record: _Applied) -> None:
    point = record.point
    current = vars(record.owner).get(record.name, _ABSENT) if point is None else point.current
    if current is not record.replacement:
        if record.patch.may_stay:
            return
        raise PatchError(
            f"{record.patch.describe()}: cannot be undone, the target was replaced again by someone else; "
            "undo the other replacement first"
        )
    if point is None:
        _unbind(record)
    else:
        point.current = record.original  # copies call through the point, and may stay


def _unbind(record: _Applied) -> None:
    if record.original is _ABSENT:
        delattr(record.owner, record.name)
    else:
        setattr(record.owner, record.name, record.original)
    for module, key, original, replacement in record.copies:
        if vars(module).get(key) is replacement:
            setattr(module, key, original)
    # Copies that were made while the patch was in force (`from x import y` afterwards) go back as well.
    if record.patch.rebind:
        raw = record.original if record.original is not _ABSENT else getattr(record.owner, record.name)
        _rebind_copies(record.replacement, raw, record.owner, record.name, _Globals())
