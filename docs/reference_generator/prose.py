# SPDX-License-Identifier: Apache-2.0
"""Plain text of docstrings and help texts as Markdown that shows the same characters."""

from __future__ import annotations

import re

__all__ = ["as_markdown"]


def as_markdown(text: str) -> str:
    """Return a text in which nothing but code in backticks is markup, and flags are code."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(piece if piece.startswith("`") else _plain(piece) for piece in pieces)


def _plain(text: str) -> str:
    escaped = re.sub(r"([\\*_<>\[\]|`])", r"\\\1", text)
    # A flag is code: what the escapes above have changed in it is taken back.
    return re.sub(
        r"(?<![\w-])--?[a-zA-Z][\w\\-]*", lambda found: f"`{found[0].replace(chr(92), '').rstrip('-')}`", escaped
    )
