# SPDX-License-Identifier: Apache-2.0
"""Numbers for people."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["count", "gigabytes", "ranges"]


def gigabytes(nbytes: float) -> str:
    """Return bytes in the largest unit of 10**3, 10**6, 10**9 or 10**12 that leaves a number above 1."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:.0f} bytes"


def count(number: int) -> str:
    """Return a number of elements, and about how many that is."""
    for word, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number:,} ({number / size:.2f} {word})"
    return f"{number:,}"


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers in short: `0-3, 8-11`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
