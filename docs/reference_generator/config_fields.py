# SPDX-License-Identifier: Apache-2.0
"""The fields of a config class as Markdown: name or flag, type, default, and the docstring."""

from __future__ import annotations

import dataclasses
import pkgutil
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAliasType, Union, get_args, get_origin, get_type_hints

from megatron_ext.cli.dataclass_options import field_docstrings
from megatron_ext.config_options import WITHOUT_FLAG, choices_of, flag_of
from reference_generator.prose import as_markdown

__all__ = ["described", "markdown", "of_name"]

_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", types.NoneType: "none"}


def of_name(dotted: str) -> type:
    """Return a config class by its import path, such as megatron_ext.local_sgd.config.LocalSGDConfig.

    Raises:
        ValueError: it is not a dataclass.
    """
    found = pkgutil.resolve_name(dotted)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{dotted} is not a dataclass")
    return found


def described(cls: type) -> dict[str, str]:
    """Return the docstring of every field, inherited ones too.

    Raises:
        ValueError: a field has none.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) and "__annotations__" in vars(base):
            found |= field_docstrings(base)
    return found


def markdown(cls: type, *, as_flags: bool) -> str:
    """Return a definition list of a class's fields.

    Args:
        cls: a dataclass.
        as_flags: whether fields are called by their command-line flags; those without one are left out.
    """
    return "\n".join(_lines(cls, as_flags))


def _lines(cls: type, as_flags: bool) -> Iterator[str]:
    hints, told = get_type_hints(cls), described(cls)
    for entry in dataclasses.fields(cls):
        if as_flags and entry.metadata.get(WITHOUT_FLAG):
            continue
        name = flag_of(entry) if as_flags else entry.name
        kind = _type_of(entry, hints[entry.name])
        yield from (f"`{name}` ({kind}; {_default_of(entry)})", f": {as_markdown(told[entry.name])}", "")


def _type_of(entry: dataclasses.Field[Any], hint: Any) -> str:
    choices = choices_of(entry)
    if choices is not None:
        return _one_of(choices)
    meta = entry.metadata.get("argparse_meta", {})
    many = "several of: " if meta.get("nargs") == "+" and get_origin(hint) is not list else ""
    return many + _in_words(hint)


def _in_words(hint: Any) -> str:
    if isinstance(hint, TypeAliasType):
        return _in_words(hint.__value__)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(kind) for kind in inner if kind is not types.NoneType)
    if origin is Literal:
        return _one_of(inner)
    if origin is not None and issubclass(origin, Sequence):
        return f"list of {_in_words(inner[0])}"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _one_of(choices: tuple[Any, ...]) -> str:
    return "one of " + ", ".join(f"`{choice}`" for choice in choices)


def _default_of(entry: dataclasses.Field[Any]) -> str:
    if entry.default is not dataclasses.MISSING:
        default = entry.default
    elif entry.default_factory is not dataclasses.MISSING:
        default = entry.default_factory()
    else:
        return "required"
    if default is None:
        return "unset"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"default `{default}`" if default not in ((), "", {}) else "none"
