# SPDX-License-Identifier: Apache-2.0
"""A module to patch: stands for an upstream package."""

from __future__ import annotations

import functools


def double(value: int, factor: int = 2) -> int:
    """Return `value` times `factor`."""
    return value * factor


class Tool:
    """Something with all kinds of methods."""

    def plain(self) -> str:
        """Return a word."""
        return "plain"

    @staticmethod
    def static() -> str:
        """Return a word."""
        return "static"

    @classmethod
    def made(cls) -> str:
        """Return the class's name."""
        return cls.__name__


class Inheriting(Tool):
    """Has nothing of its own."""


def louder(original):
    """Wrap a function that returns a word, or a number."""

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        result = original(*args, **kwargs)
        return f"{result}!" if isinstance(result, str) else result + 1

    return wrapped
