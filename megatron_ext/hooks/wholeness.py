# SPDX-License-Identifier: Apache-2.0
"""What is refused about a feature before a run begins: whatever would silently never be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_ext.hooks.concerns import CONCERNS, NEEDING_PATCHES
from megatron_ext.hooks.feature import Feature
from megatron_ext.hooks.handlers import handlers_of, needed_events

__all__ = ["feature_problems", "unserved"]

_LIKE_HANDLERS = ("on_", "before_", "after_")
_QUESTIONS = ("add_arguments", "enabled", "validate", "adjust_arguments", "required_patches")
_RENAMED = {"patches": "required_patches"}


def feature_problems(kind: Any) -> list[str]:
    """Return what keeps an object from being the class of a feature, one sentence each."""
    if not (isinstance(kind, type) and issubclass(kind, Feature) and kind.name):
        return ["it is not a named megatron_ext.hooks.Feature"]
    problems = []
    for protocol in CONCERNS:
        asked = _methods(protocol)
        missing = [name for name in asked if not _has(kind, name)]
        if missing and (len(missing) < len(asked) or issubclass(kind, protocol)):
            problems.append(f"it has not all of {protocol.__name__}: add {', '.join(missing)}")
        problems += [_other_arguments(kind, protocol, name) for name in asked if name not in missing]
    problems += [_other_arguments(kind, Feature, name) for name in _QUESTIONS]
    handled = handlers_of(kind)
    for name in sorted(dir(kind)):
        if name in _RENAMED:
            problems.append(f"{name} is called {_RENAMED[name]}")
        elif name.startswith(_LIKE_HANDLERS) and name not in handled and callable(getattr(kind, name)):
            problems.append(f"{name} handles no event: mark it with @on(...), or let its name begin otherwise")
    return [problem for problem in problems if problem]


def unserved(kind: type, served: set[Callable[..., Any]]) -> list[str]:
    """Return the names of events and protocols' methods that a feature's class has and that are not among `served`."""
    needed: set[Callable[..., Any]] = set(needed_events(kind))
    for protocol in NEEDING_PATCHES:
        if issubclass(kind, protocol):
            needed.update(getattr(protocol, name) for name in _methods(protocol))
    return sorted(found.__qualname__ for found in needed - served)


def _methods(protocol: type) -> list[str]:
    """Return the methods of a protocol, in the order in which they are written."""
    return [name for name, value in vars(protocol).items() if getattr(value, "__isabstractmethod__", False)]


def _has(kind: type, name: str) -> bool:
    found = getattr(kind, name, None)
    return callable(found) and not getattr(found, "__isabstractmethod__", False)


def _other_arguments(kind: type, asker: type, name: str) -> str:
    """Say so when a method cannot be called as it will be; else return an empty text."""
    wanted = inspect.signature(getattr(asker, name))
    positions: list[Any] = [None] * len(wanted.parameters)
    if isinstance(inspect.getattr_static(kind, name), (staticmethod, classmethod)):
        positions.pop()  # the attribute of the class takes no self
    own = inspect.signature(getattr(kind, name))
    try:
        own.bind(*positions)
    except TypeError:
        return f"{name}{own} takes other arguments than {asker.__name__}: ({', '.join(wanted.parameters)})"
    return ""
