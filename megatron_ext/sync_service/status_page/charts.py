# SPDX-License-Identifier: Apache-2.0
"""Small charts as inline SVG, over the numbers of rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from megatron_ext.sync_service.status_page.text import escape

__all__ = ["COLOURS", "ChartLine", "bar_chart", "line_chart", "spread"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#3b9ad9", "#6b4c9a", "#7f6a55")
"""Which the colour-blind can tell apart; a peer's is that of its index."""

_MANY_LINES = 12
"""More lines than this become three: the least, the middle, the greatest."""

_WIDTH, _HEIGHT = 520, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 24
_MARKED_ROUNDS = 60
"""Up to this many rounds every value has a point, which names it."""


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """One line of a chart."""

    label: str
    """What it is of."""

    colour: str
    """Of SVG."""

    values: Mapping[int, float]
    """Finite values by round."""


def spread(lines: Sequence[ChartLine]) -> list[ChartLine]:
    """Return the lines, or what they range over when they are too many to be told apart."""
    if len(lines) <= _MANY_LINES:
        return list(lines)
    at: dict[int, list[float]] = {}
    for line in lines:
        for number, value in line.values.items():
            at.setdefault(number, []).append(value)
    return [
        ChartLine(label=label, colour=colour, values={number: chosen(values) for number, values in sorted(at.items())})
        for label, colour, chosen in (
            ("greatest", "#9aa5b1", max),
            ("median", COLOURS[0], median),
            ("least", "#9aa5b1", min),
        )
    ]


def line_chart(lines: Sequence[ChartLine], said: Callable[[float], str], *, bridged: bool = False) -> str:
    """Return lines as SVG; their values need not begin at 0.

    Args:
        lines: in the order in which they are drawn.
        said: puts a value into words.
        bridged: whether lines continue over rounds in which they have no value, else they are interrupted there.
    """
    lines = [
        replace(line, values={number: _drawable(value) for number, value in line.values.items()}) for line in lines
    ]
    rounds = sorted({number for line in lines for number in line.values})
    values = [value for line in lines for value in line.values.values()]
    if not values:
        return _nothing()
    frame = _Frame(rounds, _ticks(min(values), max(values)), said)
    drawn = []
    for line in lines:
        stretches = [sorted(line.values)] if bridged else _unbroken(line.values, rounds)
        for points in stretches:
            path = " ".join(f"{frame.x(number):.1f},{frame.y(line.values[number]):.1f}" for number in points)
            drawn.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"/>')
        alone = {points[0] for points in stretches if len(points) == 1}
        for number, value in line.values.items():
            if len(rounds) > _MARKED_ROUNDS and number not in alone:
                continue
            title = escape(f"round {number}, {line.label}: {said(value)}")
            place = f'cx="{frame.x(number):.1f}" cy="{frame.y(value):.1f}"'
            drawn.append(f'<circle {place} r="3" fill="{line.colour}"><title>{title}</title></circle>')
    return frame.svg("".join(drawn))


def bar_chart(
    bars: Mapping[int, Sequence[float]], parts: Sequence[tuple[str, str]], said: Callable[[float], str]
) -> str:
    """Return bars as SVG, which begin at 0.

    Args:
        bars: by round, the sizes of the parts that stand on each other.
        parts: (label, colour) of each part, from below.
        said: puts a value into words.
    """
    if not bars:
        return _nothing()
    rounds = sorted(bars)
    frame = _Frame(rounds, _ticks(0.0, max(sum(sizes) for sizes in bars.values())), said)
    width = max(1.0, min(26.0, 0.7 * frame.step))
    drawn = []
    for number, sizes in bars.items():
        below = 0.0
        for (label, colour), size in zip(parts, sizes, strict=True):
            top, bottom = frame.y(below + size), frame.y(below)
            place = f'x="{frame.x(number) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}"'
            title = escape(f"round {number}, {label}: {said(size)}")
            drawn.append(f'<rect {place} height="{bottom - top:.1f}" fill="{colour}"><title>{title}</title></rect>')
            below += size
    return frame.svg("".join(drawn))


class _Frame:
    """The axes, and where on them things are."""

    def __init__(self, rounds: Sequence[int], ticks: Sequence[float], said: Callable[[float], str]) -> None:
        self._first, self._last = rounds[0], rounds[-1]
        self._ticks = ticks
        self._said = said
        self.step = (_WIDTH - _LEFT - _RIGHT) / (self._last - self._first + 1)

    def x(self, number: int) -> float:
        return _LEFT + (number - self._first + 0.5) * self.step

    def y(self, value: float) -> float:
        low, high = self._ticks[0], self._ticks[-1]
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def svg(self, content: str) -> str:
        drawn = []
        for tick, label in zip(self._ticks, _labels(self._ticks, self._said), strict=True):
            y = self.y(tick)
            drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            drawn.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        for number in self._numbers():
            x = self.x(number)
            drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{number}</text>')
        return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(drawn)}{content}</svg>'

    def _numbers(self) -> list[int]:
        """Return the rounds under which their number stands."""
        step = max(1, math.ceil(_nice((self._last - self._first) / 8)))
        return [number for number in range(self._first, self._last + 1) if number % step == 0]


def _labels(ticks: Sequence[float], said: Callable[[float], str]) -> list[str]:
    """Return words for ticks, or with as many digits as it takes to tell them apart."""
    labels = [said(tick) for tick in ticks]
    for digits in range(5, 18):
        if len(set(labels)) == len(labels):
            break
        labels = [f"{tick:.{digits}g}" for tick in ticks]
    return labels


def _drawable(value: float) -> float:
    """Return a finite value, without what is too large or too small to be reckoned with."""
    return 0.0 if abs(value) < 1e-300 else max(-1e300, min(value, 1e300))


def _nothing() -> str:
    return '<p class="none">nothing yet</p>'


def _unbroken(values: Mapping[int, float], rounds: Sequence[int]) -> list[list[int]]:
    """Return the rounds that have a value, in stretches without a round in between that has none."""
    found: list[list[int]] = [[]]
    for number in rounds:
        if number in values:
            found[-1].append(number)
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


def _ticks(low: float, high: float) -> list[float]:
    """Return 3 to 6 round values, of which the first is not above `low` and the last not below `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # One value alone: from 0 to there.
        low, high = (min(low, 0.0), max(high, 0.0)) if high else (0.0, 1.0)
    step = _nice((high - low) / 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _nice(size: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below a size."""
    if size <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))
