# SPDX-License-Identifier: Apache-2.0
"""A number that changes from round to round: a learning rate that warms up and decays, a momentum that does.

Pier (arXiv 2511.17849) has a warm-up and a decay of the outer momentum; DiLoCo keeps what it begins with.
The value of a round follows from its number alone, so that a resumed run needs nothing besides it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

__all__ = ["Points", "parse", "range_problem", "text_problems", "value_at"]

Points = tuple[tuple[int, float], ...]
"""(round, value), rounds rising from 1; in between in a straight line, outside as at the nearest one."""

_EXAMPLE = "1:0.1,10:0.7,90:0.7,100:0.1"


def parse(text: str) -> Points:
    """Return the points of a text such as 1:0.1,10:0.7.

    Raises:
        ValueError: it is none; says why.
    """
    found: list[tuple[int, float]] = []
    for pair in text.split(","):
        at, colon, value = pair.strip().partition(":")
        if not (colon and at.isdecimal()):
            raise ValueError(f"{pair.strip()!r} is not ROUND:VALUE")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a number") from None
        if not math.isfinite(number):
            raise ValueError(f"{value!r} is non-finite")
        found.append((int(at), number))
    if found[0][0] < 1:
        raise ValueError("rounds are counted from 1")
    for (before, _), (after, _) in pairwise(found):
        if after <= before:
            raise ValueError(f"round {after} comes after round {before}; give rising rounds")
    return tuple(found)


def text_problems(text: Any, allowed: Callable[[float], bool], rule: str) -> list[str]:
    """Return the problems of a text of points, one sentence each.

    Args:
        text: what was given.
        allowed: whether a value is.
        rule: what it must be, for the message.
    """
    try:
        if not isinstance(text, str):
            raise ValueError("it is not a text")
        points = parse(text)
    except ValueError as error:
        return [f"{text!r}: {error}; give pairs of a round and a value, such as {_EXAMPLE}"]
    bad = [(at, value) for at, value in points if not allowed(value)]
    return [f"{text!r}: the value of round {at} is {value:g}; it must {rule}" for at, value in bad]


def value_at(points: Points, number: int) -> float:
    """Return the value of a round.

    Args:
        points: at least one.
        number: of the round, from 1.
    """
    if number <= points[0][0]:
        return points[0][1]
    for (first, left), (last, right) in pairwise(points):
        if number <= last:
            # A point itself has its own value, to the last bit.
            return right if number == last else left + (right - left) * (number - first) / (last - first)
    return points[-1][1]


def range_problem(points: Points, rounds: int) -> str | None:
    """Return the problem of where it begins and ends, if there is one.

    Something that falls to its end has decayed; with a further point behind it is meant to stay low.

    Args:
        points: at least one.
        rounds: of the whole training, at least 1.
    """
    first, (last, lowest) = points[0][0], points[-1]
    if first > rounds:
        return f"begins at round {first}, after the last of training's {rounds}; begin earlier"
    falls = len(points) > 1 and lowest < points[-2][1]
    if falls and last < rounds:
        return (
            f"has decayed at round {last}, and training has {rounds}; end it at {rounds} or later, or add "
            f"{rounds}:{lowest:g} if it is to stay there"
        )
    return None
