# SPDX-License-Identifier: Apache-2.0
"""Where the parts of an outer round may work, and the refusals of those that do not work somewhere."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from megatron_ext.plugins import Registry

__all__ = ["HasPlaces", "Where", "place_claims", "place_problems", "refusal"]


class Where(enum.Enum):
    """Who makes the round; the value is what messages call it."""

    JOB = "a job's workers"
    PLAIN = "plain PyTorch"
    SERVER = "synchronous rounds at a server"
    ASYNCHRONOUS = "asynchronous rounds at a server"


class HasPlaces(Protocol):
    """What says of itself where it works: a class of a reducer, a codec or an outer optimizer."""

    refused_in: ClassVar[Mapping[Where, str]]
    """The places where it does not work, each with the reason, a sentence without its full stop."""


def place_problems[T: HasPlaces](said: str, registry: Registry[type[T]], name: str, place: Where) -> list[str]:
    """Return why something cannot work in a place; nothing where it can.

    Args:
        said: the option that asks for it.
        registry: that has it.
        name: what it is called there.
        place: where it would work.
    """
    return refusal(said, registry, name, registry.find(name), place)


def refusal(said: str, registry: Registry[Any], name: str, kind: type[HasPlaces], place: Where) -> list[str]:
    """Return why a class cannot work in a place, which others of a registry may; nothing where it can."""
    reason = kind.refused_in.get(place)
    if reason is None:
        return []
    others = [own for own in registry.own_names if place not in registry.find(own).refused_in]
    return [f"{said} {name} does not work in {place.value}: {reason}; use {' or '.join(others)}"]


def place_claims(kind: Any) -> list[str]:
    """Return the problems of what a class says of its places, one sentence each."""
    refused = getattr(kind, "refused_in", None)
    if not isinstance(refused, Mapping):
        return ["refused_in is not a mapping of places to reasons"]
    return [
        f"refused_in has {place!r}: {reason!r}; give a megatron_ext.outer.places.Where and the reason"
        for place, reason in refused.items()
        if not (isinstance(place, Where) and isinstance(reason, str) and reason)
    ]
