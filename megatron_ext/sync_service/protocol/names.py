# SPDX-License-Identifier: Apache-2.0
"""Names that become parts of paths. They are checked where a path is made, wherever they come from."""

from __future__ import annotations

import re

from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = ["NAME", "is_name", "path_component"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""Names of runs, peers and processes. None leads out of its folder: there is no separator, and no dot at the start."""


def is_name(text: str) -> bool:
    """Return whether a file may have a name."""
    return NAME.fullmatch(text) is not None


def path_component(text: str, what: str) -> str:
    """Return a name that may become a part of a path.

    Args:
        text: the name.
        what: is called so.

    Raises:
        Refusal: it may not.
    """
    if not is_name(text):
        raise Refusal(
            "invalid", f"{text[:100]!r} cannot be the name of a {what}; use up to 64 letters, digits, '.', '_', '-'"
        )
    return text
