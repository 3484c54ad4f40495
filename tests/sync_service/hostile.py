# SPDX-License-Identifier: Apache-2.0
"""Messages that nobody should send: every field of every message is drawn, with good ones among them."""

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

from megatron_ext.sync_service.protocol.protocol import pb2

NAMES = ("../pwned", "../../../../../../pwned", "/pwned", "a/../../pwned", "..", ".", "", "a\0b", "a\nb", "x" * 65, "~")
TEXTS = (*NAMES, "\u4f60" * 40, "%s%n{0}", "\x1b[31m", "y" * 5000, "__metadata__", "outer:momentum:w", "fp32", "w")
COUNTS = (0, 1, 2, 3, 7, 1 << 31, (1 << 32) - 1, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -0.0, -1.0, 1.5, 1e300, -1e300, 5e-324, math.inf, -math.inf, math.nan)
BLOBS = (b"", b"\0", b"\xff" * 32, b"x" * 5000)

VALUES = (None, True, False, 0, -1, 1.5, 1e300, -1e300, 1 << 40, 1 << 60, *TEXTS, [], {}, [[]], [None], {"a": 1}, [1])
"""What JSON may have in any place."""

TOKENS = ("NaN", "Infinity", "1e400", "9" * 5000, "[" * 5000, '{"a":' * 5000, '"\\ud800"', "'", "\0", '{"a":1,"a":1}')
"""What Python's own writer does not write."""


def message_of(dice: random.Random, kind: Any, good: Any, depth: int = 0) -> Any:
    """Return a message of a kind whose fields are a good one's, or drawn."""
    found = kind()
    if good is not None:
        found.CopyFrom(good)
    for field in kind.DESCRIPTOR.fields:
        if good is not None and dice.random() < 0.7:
            continue
        found.ClearField(field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(dice.choice((0, 1, 3))):
                getattr(found, field.name)[dice.choice((*TEXTS, "codec"))] = dice.choice((*TEXTS, "z" * 20_000))
        elif field.is_repeated:
            for _ in range(dice.choice((0, 1, 2, 17))):
                if field.message_type is None:
                    getattr(found, field.name).append(_drawn(dice, field))
                elif depth < 2:
                    kept = getattr(good, field.name) if good is not None else ()
                    entry = dice.choice(kept) if kept else None
                    inner = message_of(dice, _class_of(field), entry, depth + 1)
                    getattr(found, field.name).append(inner)
        elif field.message_type is not None:
            kept = getattr(good, field.name) if good is not None and good.HasField(field.name) else None
            getattr(found, field.name).CopyFrom(message_of(dice, _class_of(field), kept, depth + 1))
        elif dice.random() < 0.8:
            setattr(found, field.name, _drawn(dice, field))
    return found


def bytes_of(dice: random.Random, message: Any) -> bytes:
    """Return the bytes of a message, sometimes with text that is none in one of its fields."""
    data: bytes = message.SerializeToString()
    if dice.random() < 0.1:
        number = dice.choice([field.number for field in message.DESCRIPTOR.fields] or [1])
        data += bytes((number << 3 | 2, 3)) + b"\xff\xc0\x80"
    return data


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in what JSON holds."""
    yield at
    entries: Any = content.items() if isinstance(content, dict) else ()
    for key, value in enumerate(content) if isinstance(content, list) else entries:
        yield from places(value, (*at, key))


def with_value(content: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Return content with another value in a place."""
    if not at:
        return value
    found = copy.deepcopy(content)
    inner = found
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return found


def json_of(dice: random.Random, good: Any) -> str:
    """Return JSON in which a value of a good one is another one, or is lacking, or is none that JSON has."""
    plain = json.loads(json.dumps(good))
    at = dice.choice(list(places(plain)))
    mark = "\u0001here\u0001"
    text = json.dumps(with_value(plain, at, mark))
    match dice.randrange(4):
        case 0:
            return text.replace(json.dumps(mark), dice.choice(TOKENS))
        case 1 if at and isinstance(at[-1], str):
            return json.dumps(with_value(plain, at[:-1], _renamed(dice, plain, at)))
        case _:
            return text.replace(json.dumps(mark), json.dumps(dice.choice(VALUES)))


def _renamed(dice: random.Random, content: Any, at: tuple[Any, ...]) -> dict[str, Any]:
    """Return the object around a place with another key there, or none."""
    for key in at[:-1]:
        content = content[key]
    found = {key: value for key, value in content.items() if key != at[-1]}
    return found if dice.random() < 0.5 else {**found, dice.choice(TEXTS): content[at[-1]]}


def _class_of(field: Any) -> Any:
    return getattr(pb2, field.message_type.name)


def _drawn(dice: random.Random, field: Any) -> Any:
    kinds = type(field)
    match field.type:
        case kinds.TYPE_STRING:
            return dice.choice((*TEXTS, "fuzz", "x0", "x1", "process"))
        case kinds.TYPE_BYTES:
            return dice.choice(BLOBS)
        case kinds.TYPE_BOOL:
            return dice.random() < 0.5
        case kinds.TYPE_DOUBLE:
            return dice.choice(FLOATS)
        case kinds.TYPE_UINT32 | kinds.TYPE_FIXED32:
            return dice.choice([count for count in COUNTS if count < 1 << 32])
        case kinds.TYPE_UINT64:
            return dice.choice(COUNTS)
    raise AssertionError(f"no values for {field.name}")
