# SPDX-License-Identifier: Apache-2.0
"""JSON from other processes, checked: a *kind* takes what was parsed and returns it typed, or names what is wrong.

    job = record(Job, peer=name, round=integer(0))
    job(parse('{"peer": "a", "round": 1}'), "job")

Every number has a range and every text and list a length; nothing may be missing, and nothing more may be there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from megatron_ext.sync_service.protocol.names import is_name
from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = [
    "LARGEST_COUNT",
    "Kind",
    "Malformed",
    "flag",
    "having",
    "integer",
    "list_of",
    "map_of",
    "name",
    "number",
    "optional",
    "parse",
    "record",
    "row",
    "scalar",
    "text",
]

type Kind[T] = Callable[[Any, str], T]
"""Takes a value and what it is called, and returns it with its type. Raises `Malformed`."""

LARGEST_COUNT = 1 << 53
"""The largest whole number that every reader of JSON keeps."""

_LONGEST_TEXT = 10_000
_LONGEST_LIST = 1_000_000
_LONGEST_NUMBER = 20
_SHOWN = 60


class Malformed(Refusal):
    """What was sent is not what it has to be. The message names the field."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid", message)


def parse(content: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        Malformed: it is not JSON, or has what readers differ in: NaN, huge numbers, a key twice, too many levels.
    """
    try:
        return json.loads(
            content, parse_constant=_refuse_constant, parse_int=_whole_number, object_pairs_hook=_without_repetition
        )
    except RecursionError:
        raise Malformed("it has too many levels") from None
    except ValueError as error:
        raise Malformed(f"it is not JSON ({error})") from None


def integer(least: int = 0, most: int = LARGEST_COUNT) -> Kind[int]:
    """Return the kind of whole numbers in a range."""

    def kind(value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise Malformed(f"{where} is {_shown(value)}; it must be a whole number of {least} to {most}")
        return value

    return kind


def number(least: float = -math.inf, most: float = math.inf) -> Kind[float]:
    """Return the kind of finite numbers in a range."""

    def kind(value: Any, where: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not least <= value <= most:
            limits = "" if least == -math.inf and most == math.inf else f" of {least:g} to {most:g}"
            raise Malformed(f"{where} is {_shown(value)}; it must be a finite number{limits}")
        return float(value)

    return kind


def text(longest: int = _LONGEST_TEXT) -> Kind[str]:
    """Return the kind of texts up to a length."""

    def kind(value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > longest or not _is_unicode(value):
            raise Malformed(f"{where} is {_shown(value)}; it must be text of up to {longest} letters")
        return value

    return kind


def name(value: Any, where: str) -> str:
    """Take a name that may become a part of a path."""
    if not isinstance(value, str) or not is_name(value):
        raise Malformed(f"{where} is {_shown(value)}; it must be a name: up to 64 letters, digits, '.', '_', '-'")
    return value


def flag(value: Any, where: str) -> bool:
    """Take true or false."""
    if not isinstance(value, bool):
        raise Malformed(f"{where} is {_shown(value)}; it must be true or false")
    return value


def scalar(value: Any, where: str) -> str | float | bool | None:
    """Take a value that is neither a list nor an object, such as a field of a configuration."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text()(value, where)
    if isinstance(value, int):
        return integer(-LARGEST_COUNT)(value, where)
    return number()(value, where)


def optional[T](kind: Kind[T]) -> Kind[T | None]:
    """Return the kind of values that may be null."""
    return lambda value, where: None if value is None else kind(value, where)


def list_of[T](kind: Kind[T], longest: int = _LONGEST_LIST) -> Kind[tuple[T, ...]]:
    """Return the kind of lists of one kind of values."""

    def found(value: Any, where: str) -> tuple[T, ...]:
        return tuple(kind(entry, f"{where}[{place}]") for place, entry in enumerate(_listed(value, where, longest)))

    return found


def row(*kinds: Kind[Any]) -> Kind[tuple[Any, ...]]:
    """Return the kind of lists with one value of each kind."""

    def found(value: Any, where: str) -> tuple[Any, ...]:
        if len(_listed(value, where, _LONGEST_LIST)) != len(kinds):
            raise Malformed(f"{where} has {len(value)} entries; it must have {len(kinds)}")
        together = enumerate(zip(kinds, value, strict=True))
        return tuple(kind(entry, f"{where}[{place}]") for place, (kind, entry) in together)

    return found


def map_of[T](key: Kind[str], kind: Kind[T]) -> Kind[dict[str, T]]:
    """Return the kind of objects whose keys are of one kind, and whose values of another."""

    def found(value: Any, where: str) -> dict[str, T]:
        entries = _object(value, where).items()
        return {key(entry, f"a key of {where}"): kind(held, f"{where}.{entry[:_SHOWN]}") for entry, held in entries}

    return found


def record[T](make: Callable[..., T], may_lack: tuple[str, ...] = (), **kinds: Kind[Any]) -> Kind[T]:
    """Return the kind of objects with certain fields.

    Args:
        make: is given the fields by their names.
        may_lack: fields that need not be there; `make` has values for them.
        kinds: of the fields.
    """

    def found(value: Any, where: str) -> T:
        fields = _object(value, where)
        for entry in fields:
            if entry not in kinds:
                raise Malformed(f"{where}.{entry[:_SHOWN]!r} is not known; the fields are {', '.join(kinds)}")
        for entry in kinds:
            if entry not in fields and entry not in may_lack:
                raise Malformed(f"{where}.{entry} is missing")
        return make(**{entry: kinds[entry](held, f"{where}.{entry}") for entry, held in fields.items()})

    return found


def having(**kinds: Kind[Any]) -> Kind[dict[str, Any]]:
    """Return the kind of objects with certain fields, and perhaps others, of which nothing is known."""

    def found(value: Any, where: str) -> dict[str, Any]:
        fields = _object(value, where)
        for entry in kinds:
            if entry not in fields:
                raise Malformed(f"{where}.{entry} is missing")
        return {**fields, **{entry: kind(fields[entry], f"{where}.{entry}") for entry, kind in kinds.items()}}

    return found


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{where} is {_shown(value)}; it must be an object")
    return value


def _listed(value: Any, where: str, longest: int) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) > longest:
        raise Malformed(f"{where} is {_shown(value)}; it must be a list of up to {longest} entries")
    return value


def _shown(value: Any) -> str:
    """Return a value in a few letters, whatever it is."""
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    shown = ascii(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."


def _is_unicode(value: str) -> bool:
    """Return whether text can be written: JSON may have halves of letters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(word: str) -> float:
    raise Malformed(f"it has {word}, which is not a JSON number")


def _whole_number(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise Malformed(f"it has a whole number of {len(digits)} digits")
    return int(digits)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Malformed("it has an object with a key twice")
    return found
