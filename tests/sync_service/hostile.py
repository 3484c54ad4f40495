# SPDX-License-Identifier: Apache-2.0
"""Messages that nobody should send: every field of every message is drawn, with good ones among them."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ext.sync_service.protocol.protocol import pb2

NAMES = ("../pwned", "../../../../../../pwned", "/pwned", "a/../../pwned", "..", ".", "", "a\0b", "a\nb", "x" * 65, "~")
TEXTS = (*NAMES, "\u4f60" * 40, "%s%n{0}", "\x1b[31m", "y" * 5000, "__metadata__", "outer:momentum:w", "fp32", "w")
COUNTS = (0, 1, 2, 3, 7, 1 << 31, (1 << 32) - 1, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -0.0, -1.0, 1.5, 1e300, -1e300, 5e-324, math.inf, -math.inf, math.nan)
BLOBS = (b"", b"\0", b"\xff" * 32, b"x" * 5000)

def message_of(dice: random.Random, kind: Any, good: Any, depth: int = 0) -> Any:
    """Return a message of a kind whose fields are a good one's, or drawn."""
    found = kind()
    if good is not None:
        found.CopyFrom(good)
    for field in kind.DESCRIPTOR.fields:
        if good is not None and dice.random() < 0.7:
            continue
        group = field.containing_oneof
        if group is not None and found.WhichOneof(group.name) not in (None, field.name) and dice.random() < 0.9:
            continue
        found.ClearField(field.name)
        if is_map(field):
            inner = field.message_type.fields_by_name["value"]
            for _ in range(dice.choice((0, 1, 3))):
                key = dice.choice((*TEXTS, "codec", "peers", "x0"))
                if inner.message_type is not None:
                    getattr(found, field.name)[key].CopyFrom(message_of(dice, _class_of(inner), None, depth + 1))
                else:
                    value = "z" * 20_000 if inner.type == type(inner).TYPE_STRING and dice.random() < 0.1 else None
                    getattr(found, field.name)[key] = dice.choice(values_of(inner)) if value is None else value
        elif field.is_repeated:
            for _ in range(dice.choice((0, 1, 2, 17))):
                if field.message_type is None:
                    getattr(found, field.name).append(dice.choice(values_of(field)))
                elif depth < 5:
                    kept = getattr(good, field.name) if good is not None else ()
                    entry = dice.choice(kept) if kept else None
                    inner = message_of(dice, _class_of(field), entry, depth + 1)
                    getattr(found, field.name).append(inner)
        elif field.message_type is not None:
            kept = getattr(good, field.name) if good is not None and good.HasField(field.name) else None
            getattr(found, field.name).CopyFrom(message_of(dice, _class_of(field), kept, depth + 1))
        elif dice.random() < 0.8:
            setattr(found, field.name, dice.choice(values_of(field)))
    return found


def bytes_of(dice: random.Random, message: Any) -> bytes:
    """Return the bytes of a message, sometimes with text that is none in one of its fields."""
    data: bytes = message.SerializeToString()
    if dice.random() < 0.1:
        number = dice.choice([field.number for field in message.DESCRIPTOR.fields] or [1])
        data += bytes((number << 3 | 2, 3)) + b"\xff\xc0\x80"
    return data


def variants(message: Any) -> Iterator[Any]:
    """Yield messages in which one field, wherever it is, has another value, or is lacking."""
    for field in message.DESCRIPTOR.fields:
        for change in _changes(message, field):
            found = type(message)()
            found.CopyFrom(message)
            found.ClearField(field.name)
            change(found)
            yield found


def _changes(message: Any, field: Any) -> Iterator[Callable[[Any], None]]:
    """Yield what gives a field, which was cleared, another value."""
    name, value = field.name, getattr(message, field.name)
    yield lambda found: None
    if is_map(field):
        inner = field.message_type.fields_by_name["value"]
        for key in NAMES:
            yield lambda found, key=key: _put(found, name, key, inner, message)
        for other in () if inner.message_type else values_of(inner):
            for key in value:
                yield lambda found, key=key, other=other: getattr(found, name).update({key: other})
    elif field.is_repeated and field.message_type is not None:
        yield lambda found: getattr(found, name).extend([*value, *value])
        for place, entry in enumerate(value):
            for other in variants(entry):
                yield lambda found, place=place, other=other: getattr(found, name).extend(
                    [*value[:place], other, *value[place + 1 :]]
                )
    elif field.is_repeated:
        for other in values_of(field):
            yield lambda found, other=other: getattr(found, name).extend([other, *value[1:]])
        yield lambda found: getattr(found, name).extend([*value, *value, *value])
    elif field.message_type is not None:
        if message.HasField(name):
            for other in variants(value):
                yield lambda found, other=other: getattr(found, name).CopyFrom(other)
        elif field.containing_oneof is None:
            yield lambda found: getattr(found, name).SetInParent()
    else:
        for other in values_of(field):
            yield lambda found, other=other: setattr(found, name, other)


def _put(found: Any, name: str, key: str, inner: Any, good: Any) -> None:
    entries = getattr(found, name)
    if inner.message_type is not None:
        entries[key].SetInParent()
    else:
        entries[key] = next(iter(getattr(good, name).values()), values_of(inner)[0])


def is_map(field: Any) -> bool:
    """Return whether a field holds values by keys."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def values_of(field: Any) -> tuple[Any, ...]:
    """Return values of a field's type that hardly anybody sends."""
    kinds = type(field)
    match field.type:
        case kinds.TYPE_STRING:
            return (*TEXTS, "fuzz", "x0", "x1", "process")
        case kinds.TYPE_BYTES:
            return BLOBS
        case kinds.TYPE_BOOL:
            return True, False
        case kinds.TYPE_DOUBLE:
            return FLOATS
        case kinds.TYPE_UINT32 | kinds.TYPE_FIXED32:
            return tuple(count for count in COUNTS if count < 1 << 32)
        case kinds.TYPE_UINT64:
            return COUNTS
        case kinds.TYPE_INT64:
            return (-(1 << 63), -2, -1, *(count for count in COUNTS if count < 1 << 63))
    raise AssertionError(f"no values for {field.name}")


def _class_of(field: Any) -> Any:
    return getattr(pb2, field.message_type.name)
