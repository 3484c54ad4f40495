# SPDX-License-Identifier: Apache-2.0
"""Options of a release of Megatron that the table says nothing of: nobody has looked at what they do to a feature."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron_ext.options.default_rules import rule_of
from megatron_ext.options.table import ROWS

__all__ = ["UnknownOption", "unknown_options", "unknown_problems"]


@dataclass(frozen=True, kw_only=True)
class UnknownOption:
    """An option without a row and without a rule."""

    flag: str
    """On the command line."""

    argument: str
    """In Megatron's arguments."""

    default: Any
    """Its value where it is not given."""


def unknown_options(parser: argparse.ArgumentParser) -> list[UnknownOption]:
    """Return the options that the table says nothing of.

    Args:
        parser: Megatron's, with its own options alone.
    """
    with_rows = {flag for row in ROWS for flag in row.flags}
    actions = [(group.title or "", action) for group in parser._action_groups for action in group._group_actions]
    known, unknown = set(), []
    for title, action in actions:
        has_rule = any(rule_of(flag, title) is not None for flag in action.option_strings)
        if has_rule or not with_rows.isdisjoint(action.option_strings):
            known.add(action.dest)
        elif not isinstance(action, argparse._HelpAction):
            flag = action.option_strings[0] if action.option_strings else action.dest
            unknown.append(UnknownOption(flag=flag, argument=action.dest, default=action.default))
    # Several flags may set one argument.
    return [option for option in unknown if option.argument not in known]


def unknown_problems(args: argparse.Namespace, options: list[UnknownOption]) -> list[str]:
    """Return one sentence for each of these options that is given.

    Args:
        args: Megatron's arguments as parsed, before Megatron validates and changes them.
        options: what `unknown_options` returned.
    """
    return [
        f"{option.flag} is an option of this release of Megatron of which nobody has looked at what it does here "
        "(docs/versions.md); drop it"
        for option in options
        if getattr(args, option.argument, option.default) != option.default
    ]
