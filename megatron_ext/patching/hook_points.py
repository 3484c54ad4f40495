# SPDX-License-Identifier: Apache-2.0
"""Hook points: functions that a fork of Megatron calls through us, because its own source says so.

The last lines of a fork's module hand its functions over (patches/README.md):

    from megatron.core.hook_points import declare as _declare
    _declare(globals(), "train", "train_step", "Trainer.step")

Each is replaced, while the module is still being imported, by a function that calls what is in force: the fork's own
until a patch puts its wrapper there. So nothing is rebound later, and copies made anywhere by `from module import name`
follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["HookPoint", "declare", "hook_point_of"]


class HookPoint:
    """A function that is called through here."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.original = function
        """The fork's own function."""

        self.current = function
        """What calls run: `original`, or wrappers around it."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.current(*args, **kwargs)

        self.call = call
        """What stands in the fork's module or class."""

        _points[id(call)] = self


_points: dict[int, HookPoint] = {}
"""By the identity of `call`, which its point keeps alive. A wrapper around it is another object, and no hook point."""


def declare(namespace: dict[str, Any], *attributes: str) -> None:
    """Make hook points of functions and methods of a module; its last statement.

    What is not there, is inherited, or is not a function stays as it is; a patch that needs it says so when applied.

    Args:
        namespace: the module's globals.
        attributes: `name` or `Class.name`.
    """
    for attribute in attributes:
        class_name, _, name = attribute.rpartition(".")
        owner = namespace.get(class_name)
        members = vars(owner) if isinstance(owner, type) else {} if class_name else namespace
        raw: Any = members.get(name)
        kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
        function = raw if kind is None else raw.__func__
        if not callable(function) or isinstance(function, type) or hook_point_of(function) is not None:
            continue
        call = HookPoint(function).call
        replacement = call if kind is None else kind(call)
        if class_name:
            setattr(owner, name, replacement)
        else:
            namespace[name] = replacement


def hook_point_of(function: Any) -> HookPoint | None:
    """Return the hook point whose `call` a function is."""
    point = _points.get(id(function))
    return point if point is not None and point.call is function else None
