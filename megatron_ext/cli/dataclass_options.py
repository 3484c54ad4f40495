# SPDX-License-Identifier: Apache-2.0
"""A frozen dataclass as options of a command: a flag per field, whose help is the field's docstring."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_ext.phrases import as_option

__all__ = ["METAVARS", "add_fields", "field_docstrings", "from_options", "whole_number"]

METAVARS: Mapping[type, str] = MappingProxyType({int: "N", float: "X", str: "TEXT"})
"""What the help calls a value."""


def whole_number(text: str) -> int:
    """Return a whole number, which people also write as 1e6.

    Raises:
        ValueError: it is none.
    """
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():
            raise
        return int(value)


whole_number.__name__ = "int"  # what argparse calls it in its messages


def field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a class, in one line.

    Raises:
        ValueError: a field has none.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for entry, text in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not (isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)):
            continue
        if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
            raise ValueError(f"{cls.__name__}.{entry.target.id} has no docstring")
        found[entry.target.id] = " ".join(str(text.value.value).replace("``", "").split())
    return found


def add_fields(parser: argparse._ActionsContainer, cls: type) -> None:
    """Add a flag for every field of a dataclass of numbers, names and texts, each with a default, and switches."""
    hints, told = get_type_hints(cls), field_docstrings(cls)
    for entry in fields(cls):
        hint, flag = hints[entry.name], as_option(entry.name)
        if hint is bool:
            assert entry.default is False
            parser.add_argument(flag, action="store_true", help=told[entry.name].rstrip(".").replace("%", "%%"))
            continue
        if NoneType in get_args(hint):  # a number that need not be given
            (hint,) = (one for one in get_args(hint) if one is not NoneType)
        choices = get_args(hint) if get_origin(hint) is Literal else None
        default = "" if entry.default is None else f" (default: {entry.default})"
        parser.add_argument(
            flag,
            type=str if choices else whole_number if hint is int else hint,
            choices=choices,
            default=entry.default,
            metavar=None if choices else METAVARS[hint],
            help=(told[entry.name].rstrip(".") + default).replace("%", "%%"),
        )


def from_options(cls: type[Any], options: argparse.Namespace) -> Any:
    """Return the dataclass that was asked for; a field whose option has no value keeps its default."""
    given = {entry.name: getattr(options, entry.name) for entry in fields(cls)}
    return cls(**{name: value for name, value in given.items() if value is not None})
