# SPDX-License-Identifier: Apache-2.0
"""Values from other processes and from files, checked: each function returns what it is given, or says what is wrong.

Every number has a range and every text a length. A protobuf message has its fields' types already; JSON has not.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_ext.sync_service.protocol.names import is_name
from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = ["LARGEST_COUNT", "Malformed", "check_count", "check_name", "check_number", "check_text", "shown"]

LARGEST_COUNT = 1 << 53
"""The largest whole number that every reader of JSON keeps."""

_LONGEST_TEXT = 10_000
_SHOWN = 60


class Malformed(Refusal):
    """What was sent is not what it has to be. The message names the field."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid", message)


def check_count(value: Any, where: str, *, least: int = 0, most: int = LARGEST_COUNT) -> int:
    """Return a whole number of a range.

    Raises:
        Malformed: it is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Malformed(f"{where} is {shown(value)}; it must be a whole number of {least} to {most}")
    return value


def check_number(value: Any, where: str, *, least: float = -math.inf, most: float = math.inf) -> float:
    """Return a finite number of a range.

    Raises:
        Malformed: it is something else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        limits = "" if least == -math.inf and most == math.inf else f" of {least:g} to {most:g}"
        raise Malformed(f"{where} is {shown(value)}; it must be a finite number{limits}")
    return float(value)


def check_text(value: Any, where: str, *, longest: int = _LONGEST_TEXT) -> str:
    """Return text up to a length.

    Raises:
        Malformed: it is something else.
    """
    if not isinstance(value, str) or len(value) > longest or not _is_unicode(value):
        raise Malformed(f"{where} is {shown(value)}; it must be text of up to {longest} letters")
    return value


def check_name(value: Any, where: str) -> str:
    """Return a name that may become a part of a path.

    Raises:
        Malformed: it is something else.
    """
    if not isinstance(value, str) or not is_name(value):
        raise Malformed(f"{where} is {shown(value)}; it must be a name: up to 64 letters, digits, '.', '_', '-'")
    return value


def shown(value: Any) -> str:
    """Return a value in a few letters, whatever it is."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    text = ascii(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _is_unicode(value: str) -> bool:
    """Return whether text can be written: JSON may have halves of letters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
