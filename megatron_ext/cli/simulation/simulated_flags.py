# SPDX-License-Identifier: Apache-2.0
"""The options of a run that a simulation takes, under their own names, and the refusal of all others."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints

from megatron_ext.cli.dataclass_options import METAVARS, field_docstrings, whole_number
from megatron_ext.config_options import choices_of, flag_of

__all__ = ["DECIDES_NOTHING", "ProductFlags"]

DECIDES_NOTHING = "decides over no time and no byte that are simulated; drop it"
"""Said of an option of a run, as it follows its name."""


class ProductFlags:
    """Options that are fields of config classes of a run."""

    def __init__(self, classes: Iterable[type], simulated: frozenset[str], reasons: Mapping[str, str]) -> None:
        """Take the classes.

        Args:
            classes: of configurations; each field's docstring is its help.
            simulated: names of the fields that decide over time or bytes.
            reasons: by field, why an option is refused and what to do instead, as it follows the option's name; for
                those of which it cannot be said that they decide over nothing that is simulated.
        """
        self._classes = tuple(classes)
        self._simulated = simulated
        self._reasons = reasons
        known = {entry.name for kind in self._classes for entry in _fields(kind)}
        assert simulated | reasons.keys() <= known, (simulated | reasons.keys()) - known

    def add(self, parser: argparse.ArgumentParser, title: str) -> None:
        """Add the options; those that are not simulated only so that they can be refused by name."""
        group = parser.add_argument_group(title)
        for kind in self._classes:
            hints, told = get_type_hints(kind), field_docstrings(kind)
            for entry in _fields(kind):
                if entry.name not in self._simulated:
                    continue
                if hints[entry.name] is bool:
                    group.add_argument(
                        flag_of(entry), dest=_place(entry), action="store_true", help=_shown(told[entry.name])
                    )
                    continue
                alternatives = get_args(hints[entry.name]) or (hints[entry.name],)
                is_text = any(isinstance(one, str) or one is str for one in alternatives)
                of_type = str if is_text else next(one for one in alternatives if one in (int, float))
                default = "" if entry.default is None else f" (default: {entry.default})"
                choices = [one for one in alternatives if isinstance(one, str)] or choices_of(entry)
                group.add_argument(
                    flag_of(entry),
                    dest=_place(entry),
                    type=whole_number if of_type is int else of_type,
                    choices=choices,
                    metavar=None if choices else METAVARS[of_type],
                    default=entry.default,
                    help=_shown(told[entry.name]) + default,
                )
        self.add_refused(parser)

    def add_refused(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that are not simulated, without help, so that they can be refused by name."""
        for entry in self._refused():
            parser.add_argument(flag_of(entry), nargs="*", dest=_place(entry), default=None, help=argparse.SUPPRESS)

    def problems(self, options: argparse.Namespace) -> list[str]:
        """Return which options were given that are not simulated, one sentence each.

        Args:
            options: that were parsed.
        """
        return [
            f"{flag_of(entry)} {self._reasons.get(entry.name, DECIDES_NOTHING)}"
            for entry in self._refused()
            if getattr(options, _place(entry)) is not None
        ]

    def _refused(self) -> Iterator[Field[Any]]:
        for kind in self._classes:
            yield from (entry for entry in _fields(kind) if entry.name not in self._simulated)

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
