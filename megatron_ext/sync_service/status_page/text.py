# SPDX-License-Identifier: Apache-2.0
"""Figures in words, and text that is safe in HTML."""

from __future__ import annotations

import html
import math

__all__ = ["bytes_text", "escape", "figure_text", "seconds_text"]


def escape(text: object) -> str:
    """Return text that stands for itself in HTML, in attributes too. All that peers say goes through here."""
    return html.escape(str(text), quote=True)


def bytes_text(count: float) -> str:
    """Return a number of bytes, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{_short(count)} {unit}"
        count /= 1000
    return f"{_short(count)} TB"


def seconds_text(seconds: float) -> str:
    """Return a duration, such as 2.5 s, 12 min or 3 h."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    for limit, size, unit in ((99.5, 1, "s"), (5970, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds / 86400)} days"


def figure_text(value: float) -> str:
    """Return a figure with three or four digits that count."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if abs(value) < 9.95 else f"{value:.0f}"
