# SPDX-License-Identifier: Apache-2.0
"""Where the guests' gradients go, as `megatron-ext hot-switch plan` reports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from megatron_ext.hot_switch import Links, StrategyList, SwitchFigures

__all__ = ["GradientWay", "gradient_ways"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GradientWay:
    """The way that a guest's gradients take. Bytes are those of fp32 gradients."""

    HEAD: ClassVar = (
        *("from", "to", "moved", "other nodes", "max sent", "max received", "messages"),
        *("if home", "if next", "at least ms"),
    )

    source: str
    """The guest."""

    target: str
    """Home, or the next guest."""

    figures: SwitchFigures
    """Of the way taken, in bytes of parameters."""

    factor: float
    """Bytes of a gradient by those of a parameter."""

    bytes_if_home: int
    """What all ranks together would receive if they went home."""

    bytes_if_next: int | None
    """And if they went to the next guest; None for the last one."""

    seconds: float
    """Of the way taken, at least."""

    def as_object(self) -> dict[str, Any]:
        """Return an entry of the JSON output."""
        return {
            "from": self.source,
            "to": self.target,
            **{
                name: int(getattr(self.figures, name) * self.factor)
                for name in ("bytes_total", "bytes_inter_node", "max_sent", "max_received")
            },
            "messages": self.figures.messages,
            "bytes_if_home": self.bytes_if_home,
            "bytes_if_next": self.bytes_if_next,
            "seconds": self.seconds,
        }

    def as_row(self) -> tuple[str, ...]:
        """Return a row of the table under `HEAD`."""
        found = self.as_object()
        sizes = ("bytes_total", "bytes_inter_node", "max_sent", "max_received")
        return (
            self.source,
            self.target,
            *(f"{found[name] / _GIB:.2f}" for name in sizes),
            str(self.figures.messages),
            f"{self.bytes_if_home / _GIB:.2f}",
            "-" if self.bytes_if_next is None else f"{self.bytes_if_next / _GIB:.2f}",
            f"{1000 * self.seconds:.1f}",
        )


def gradient_ways(
    chosen: StrategyList,
    figures: Sequence[SwitchFigures],
    direct: Sequence[SwitchFigures],
    links: Links,
    factor: float,
) -> list[GradientWay]:
    """Return where each guest's gradients go: home or to the next guest, whichever moves fewer bytes.

    Args:
        chosen: the strategies.
        figures: of all switches, in the order of a step.
        direct: of the switches home from all guests but the last.
        links: of the machine.
        factor: bytes of a gradient by those of a parameter.
    """
    ways = []
    last = len(figures) - 2
    for number, ((guest, after), onward) in enumerate(zip(chosen.switches[1:], figures[1:], strict=True)):
        home = onward if number == last else direct[number]
        # Of equals home: that needs no memory at another guest.
        target, taken = (after, onward) if onward.bytes_total < home.bytes_total else (chosen.home, home)
        ways.append(
            GradientWay(
                source=guest.label,
                target=target.label,
                figures=taken,
                factor=factor,
                bytes_if_home=int(home.bytes_total * factor),
                bytes_if_next=None if number == last else int(onward.bytes_total * factor),
                seconds=taken.seconds(links) * factor,
            )
        )
    return ways
