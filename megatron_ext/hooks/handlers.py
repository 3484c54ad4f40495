# SPDX-License-Identifier: Apache-2.0
"""Marking a feature's methods as handlers of events, and finding them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_ext.hooks.events import Event

__all__ = ["handlers_of", "needed_events", "on"]

_MARK, _ALWAYS = "_megatron_ext_event", "_megatron_ext_always"


def on[F, E: Event](
    event: type[E], *, always: bool = True
) -> Callable[[Callable[[F, E], None]], Callable[[F, E], None]]:
    """Return the decorator of a feature's method that is called with every event of this type.

    Args:
        event: the type.
        always: whether the feature needs the event, so that a run in which no patch raises it is refused. Off for what
            only other features' patches raise.

    Raises:
        TypeError: `event` is not a type of event, or the method takes something else than the event.
    """
    if not (isinstance(event, type) and issubclass(event, Event) and event is not Event):
        raise TypeError(f"@on({event!r}): that is not an event; megatron_ext.hooks.events has them all")

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
        setattr(method, _ALWAYS, always)
        return method

    return mark


def handlers_of(kind: type) -> dict[str, type[Event]]:
    """Return the events that a class handles, by the name of the method, in the order in which they are written.

    A method that replaces a handler of a base class handles the same event, marked or not.
    """
    return {name: getattr(method, _MARK) for name, method in _marked(kind).items()}


def needed_events(kind: type) -> set[type[Event]]:
    """Return the events without which a class has handlers that are never called, and should be."""
    return {getattr(method, _MARK) for method in _marked(kind).values() if getattr(method, _ALWAYS)}


def _marked(kind: type) -> dict[str, Any]:
    """Return the marked methods by name, of several with one name the last that is marked."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found.update({name: value for name, value in vars(base).items() if hasattr(value, _MARK)})
    return found
