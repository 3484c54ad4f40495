# SPDX-License-Identifier: Apache-2.0
"""The status of a server as its callers read it; see status.py for what it writes."""

from __future__ import annotations

from typing import Any

from megatron_ext.sync_service.protocol.field_checks import Malformed, check_count, check_name, check_number, check_text

__all__ = ["read_status"]

_NAMES = frozenset({"run", "peer", "contributors"})
"""Fields with names of runs and peers."""


def read_status(reply: Any) -> dict[str, Any]:
    """Return what a server's StatusReply says, as plain data; None for what is absent.

    Raises:
        Malformed: it is the reply of a server of an earlier release, or has what no server sends.
    """
    if not reply.version:
        raise Malformed("it does not say the server's release, as those of protocol 5 and later do")
    return _plain(reply, "status")


def _plain(message: Any, where: str) -> dict[str, Any]:
    """Return the fields of a message by their names."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value, place = getattr(message, field.name), f"{where}.{field.name}"
        if field.name == "rejected":
            key = f"a key of {place}"
            found[field.name] = {check_name(peer, key): check_text(why, place) for peer, why in value.items()}
        elif field.is_repeated:
            found[field.name] = [_value(field, entry, f"{place}[{number}]") for number, entry in enumerate(value)]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = _value(field, value, place)
    return found


def _value(field: Any, value: Any, where: str) -> Any:
    if field.message_type is not None:
        return _plain(value, where)
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return check_name(value, where) if field.name in _NAMES else check_text(value, where)
    return check_count(value, where) if isinstance(value, int) else check_number(value, where)
