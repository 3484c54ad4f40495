# SPDX-License-Identifier: Apache-2.0
"""JSON from small files that others may have written or damaged: it becomes what it has to be, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from megatron_ext.sync_service.protocol.field_checks import Malformed, shown

__all__ = ["parse", "record"]

_LONGEST_NUMBER = 20


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


def record[T](value: Any, where: str, make: Callable[..., T], /, **checks: Callable[[Any, str], Any]) -> T:
    """Return what `make` makes of an object that has certain fields and no others.

    Args:
        value: what was parsed.
        where: what it is called.
        make: is given the fields by their names.
        checks: of the fields, see field_checks.py.

    Raises:
        Malformed: it is something else.
    """
    if not isinstance(value, dict):
        raise Malformed(f"{where} is {shown(value)}; it must be an object")
    for field in value:
        if field not in checks:
            raise Malformed(f"{where}.{shown(field)} is not known; the fields are {', '.join(checks)}")
    for field in checks:
        if field not in value:
            raise Malformed(f"{where}.{field} is missing")
    return make(**{field: check(value[field], f"{where}.{field}") for field, check in checks.items()})


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
