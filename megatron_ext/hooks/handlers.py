# SPDX-License-Identifier: Apache-2.0
"""Marking a feature's methods as handlers of events, and finding them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_ext.hooks.events import Event

__all__ = ["handlers_of", "on"]

_MARK = "_megatron_ext_event"


def on[F, E: Event](event: type[E]) -> Callable[[Callable[[F, E], None]], Callable[[F, E], None]]:
    """Return the decorator of a feature's method that is called with every event of this type.

    Raises:
        TypeError: `event` is no type of event, or the method takes something else than the event.
    """
    if not (isinstance(event, type) and issubclass(event, Event) and event is not Event):
        raise TypeError(f"@on({event!r}): that is no event; megatron_ext.hooks.events has them all")

    def mark(method: Callable[[F, E], None]) -> Callable[[F, E], None]:
        try:
            inspect.signature(method).bind(None, None)
        except TypeError:
            name = getattr(method, "__qualname__", repr(method))
            raise TypeError(
                f"{name}{inspect.signature(method)} cannot handle {event.__name__}: a handler takes the event alone, "
                f"(self, event: {event.__name__})"
            ) from None
        setattr(method, _MARK, event)
        return method

    return mark


def handlers_of(kind: type) -> dict[str, type[Event]]:
    """Return the events that a class handles, by the name of the method, in the order in which they are written.

    A method that replaces a handler of a base class handles the same event, marked or not.
    """
    found: dict[str, type[Event]] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            event: Any = getattr(value, _MARK, None)
            if event is not None:
                found[name] = event
    return found
