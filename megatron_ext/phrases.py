# SPDX-License-Identifier: Apache-2.0
"""Parts of sentences for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["as_field", "as_option", "listed", "meant_option", "plural", "short_number"]

_DIGITS = 20
"""Of a whole number that a message has in full."""


def as_option(name: str) -> str:
    """Return the option that sets a field or an argument, where it has no name of its own."""
    return "--" + name.replace("_", "-")


def as_field(option: str) -> str:
    """Return the field or argument that such an option sets."""
    return option.removeprefix("--").replace("-", "_")


def meant_option(word: str, known: Iterable[str]) -> str | None:
    """Return the question which of the known options a mistyped one is to be; None where none is near."""
    typed, options = word.partition("=")[0], list(known)
    near = [option for option in options if option.startswith(typed)]
    near = near or difflib.get_close_matches(typed, options, n=1)
    return f"did you mean {' or '.join(near[:5])}?" if near else None


def listed(names: Sequence[str], limit: int = 5, more: str = "more unit") -> str:
    """Return names for a message, the first few of them when there are many, and how many `more` there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {plural(rest, more)}" if rest > 0 else "")


def plural(number: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short_number(value: float) -> str:
    """Return a number of any size for a message; `:g` cannot be used of a whole one that no float can hold."""
    if not isinstance(value, int):
        return f"{value:g}"
    return str(value) if abs(value) < 10**_DIGITS else f"a number of more than {_DIGITS} digits"
