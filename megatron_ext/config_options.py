# SPDX-License-Identifier: Apache-2.0
"""Config fields as command-line options."""

import argparse
import numbers
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field
from types import MappingProxyType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from megatron_ext.phrases import as_field, as_option

__all__ = [
    "ANY_TYPE",
    "WITHOUT_FLAG",
    "FromArgs",
    "argument_of",
    "choices_of",
    "flag",
    "flag_of",
    "in_field_names",
    "in_option_names",
    "on_off",
    "one_of",
]

WITHOUT_FLAG = "without_flag"
"""Key of a field's metadata: what it holds cannot be given on a command line."""


ANY_TYPE = "any_type"
"""Key of a field's metadata: in Python it holds more than its annotation tells Megatron's argument factory."""


_CHOICES = "choices"
"""Key of a field's metadata: returns the names that it may hold. Packages that are installed may add some."""


def flag(name: str, default: Any, **argparse_meta: Any) -> Any:
    """Return a field whose command-line flag is not simply its name."""
    # Megatron's namespace is flat, and a bare `normalize` or `density` would be anybody's.
    named = {"arg_names": [name], "dest": as_field(name)}
    return field(default=default, metadata={"argparse_meta": {**named, **argparse_meta}})


def one_of(name: str, default: Any, names: Callable[[], tuple[str, ...]]) -> Any:
    """Return a field that holds one of the names that there are when it is asked for, or its default."""
    named = {"arg_names": [name], "dest": as_field(name), "type": str}
    return field(default=default, metadata={"argparse_meta": named, _CHOICES: names})


def choices_of(entry: "Field[Any]") -> tuple[str, ...] | None:
    """Return the names that a config field may hold; None where it is not chosen by name."""
    names = entry.metadata.get(_CHOICES)
    return None if names is None else names()


def on_off(name: str, default: bool) -> Any:
    """Return a field whose flag has a `--no-` form."""
    return flag(name, default, action=argparse.BooleanOptionalAction)


def flag_of(entry: "Field[Any]") -> str:
    """Return the command-line flag of a config field."""
    meta = entry.metadata.get("argparse_meta", {})
    return str(meta["arg_names"][0]) if "arg_names" in meta else as_option(entry.name)


def argument_of(entry: "Field[Any]") -> str:
    """Return what a config field is called in Megatron's argument namespace."""
    return as_field(flag_of(entry))


def in_field_names(text: str, fields: Mapping[str, "Field[Any]"], off: str) -> str:
    """Return a text that speaks of flags in the words of people who never saw one.

    Args:
        text: of flags.
        fields: by name, those whose flags are replaced by their names.
        off: how a field is switched off, with `{}` for its name.
    """
    # The longest first: some flags are the beginnings of others.
    for name, entry in sorted(fields.items(), key=lambda field: -len(flag_of(field[1]))):
        flag = flag_of(entry)
        text = text.replace("--no-" + flag.removeprefix("--"), off.format(name)).replace(flag, name)
    return text


def in_option_names(text: str, names: Iterable[str], renamed: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a text that speaks of fields in the words of people who gave options.

    Args:
        text: of fields. Names without an underscore are ordinary words, too: they are replaced at the beginning of a
            sentence, and where it says what they are.
        names: of the fields that are options under their own names.
        renamed: the options of fields that are options under other names.
    """
    for name, option in {**{name: as_option(name) for name in names}, **renamed}.items():
        # Nor are they parts of a path.
        whole = rf"(?<![-\w/.]){name}(?![-\w/]|\.\w)"
        where = whole if "_" in name else rf"(?:^|(?<=: )){name}(?= )|(?<![-\w]){name}(?= is )"
        text = re.sub(where, option, text)
    return text


class FromArgs:
    """A config whose fields are Megatron arguments."""

    @classmethod
    def from_args(cls, args: Any) -> Self:
        """Read the fields from Megatron's argument namespace."""
        fields: dict[str, Field[Any]] = getattr(cls, "__dataclass_fields__")  # noqa: B009  # every subclass is one
        return cls(
            **{
                name: getattr(args, argument_of(entry))
                for name, entry in fields.items()
                if not entry.metadata.get(WITHOUT_FLAG)
            }
        )

    def type_problems(self) -> list[str]:
        """Return the values that are of another type than their field's, one sentence each.

        The command line cannot have such; a config that is made in Python can.
        """
        fields: dict[str, Field[Any]] = getattr(self, "__dataclass_fields__")  # noqa: B009  # every subclass is one
        hints = get_type_hints(type(self))
        return [
            f"{flag_of(entry)} is {value!r}; it must be {_in_words(hints[name], choices_of(entry))}"
            for name, entry in fields.items()
            if not entry.metadata.get(ANY_TYPE)
            and not _fits(value := getattr(self, name), hints[name], choices_of(entry))
        ]

    def by_flag(self) -> dict[str, Any]:
        """Return the values by their command-line flags."""
        fields: dict[str, Field[Any]] = getattr(self, "__dataclass_fields__")  # noqa: B009  # every subclass is one
        return {
            flag_of(entry): getattr(self, name)
            for name, entry in fields.items()
            if not entry.metadata.get(WITHOUT_FLAG)
        }


_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a string"),
    types.NoneType: (types.NoneType, "None"),
}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any, choices: tuple[str, ...] | None = None) -> bool:
    """Return whether a value is what a field's annotation says; True for annotations that are not looked at.

    Args:
        value: of the field.
        hint: its annotation.
        choices: what text may be.
    """
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            # 1 == True, but it is not a choice.
            fits = any(type(value) is type(choice) and value == choice for choice in get_args(kind))
        elif kind is str and choices is not None:
            fits = value in choices
        elif kind in _KINDS:
            fits = isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))
        else:
            fits = True
        if fits:
            return True
    return False


def _in_words(hint: Any, choices: tuple[str, ...] | None = None) -> str:
    found: list[str] = []
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            found += [repr(choice) for choice in get_args(kind)]
        elif kind is str and choices is not None:
            found += map(repr, choices)
        elif kind in _KINDS:
            found.append(_KINDS[kind][1])
    return " or ".join(found)
