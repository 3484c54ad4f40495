# SPDX-License-Identifier: Apache-2.0
"""The options of a run that a simulation takes, under their own names, and the refusal of all others."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints

from megatron_ext.cli.dataclass_options import field_docstrings
from megatron_ext.config_options import choices_of, flag_of

__all__ = ["ProductFlags"]


class ProductFlags:
    """Options that are fields of config classes of a run."""

    def __init__(self, classes: Iterable[type], simulated: frozenset[str]) -> None:
        """Take the classes.

        Args:
            classes: of configurations; each field's docstring is its help.
            simulated: names of the fields that decide over time or bytes.
        """
        self._classes = tuple(classes)
        self._simulated = simulated

    def add(self, parser: argparse.ArgumentParser, title: str) -> None:
        """Add the options; those that are not simulated only so that they can be refused by name."""
        group = parser.add_argument_group(title)
        for kind in self._classes:
            hints, told = get_type_hints(kind), field_docstrings(kind)
            for entry in _fields(kind):
                if entry.name not in self._simulated:
                    parser.add_argument(
                        flag_of(entry), nargs="*", dest=_place(entry), default=None, help=argparse.SUPPRESS
                    )
                elif hints[entry.name] is bool:
                    group.add_argument(
                        flag_of(entry), dest=_place(entry), action="store_true", help=_shown(told[entry.name])
                    )
                else:
                    alternatives = get_args(hints[entry.name]) or (hints[entry.name],)
                    is_text = any(isinstance(one, str) or one is str for one in alternatives)
                    group.add_argument(
                        flag_of(entry),
                        dest=_place(entry),
                        type=str if is_text else next(one for one in alternatives if one in (int, float)),
                        choices=[one for one in alternatives if isinstance(one, str)] or choices_of(entry),
                        default=entry.default,
                        help=_shown(told[entry.name]) + f" (default: {entry.default})",
                    )

    def problems(self, options: argparse.Namespace, reason: str) -> list[str]:
        """Return which options were given that nothing simulated depends on, one sentence each.

        Args:
            options: that were parsed.
            reason: why, after the option's name.
        """
        return [
            f"{flag_of(entry)} {reason}"
            for kind in self._classes
            for entry in _fields(kind)
            if entry.name not in self._simulated and getattr(options, _place(entry)) is not None
        ]

    def read(self, kind: type[Any], options: argparse.Namespace, **given: Any) -> Any:
        """Return the configuration that was asked for.

        Args:
            kind: its class.
            options: that were parsed.
            given: fields that other options decide.
        """
        names = [entry.name for entry in _fields(kind) if entry.name in self._simulated]
        return kind(**{name: getattr(options, f"run_{name}") for name in names}, **given)


def _fields(kind: type[Any]) -> list[Field[Any]]:
    return [entry for entry in fields(kind) if entry.default is not MISSING or entry.default_factory is not MISSING]


def _place(entry: Field[Any]) -> str:
    return f"run_{entry.name}"


def _shown(text: str) -> str:
    return text.rstrip(".").replace("%", "%%")
