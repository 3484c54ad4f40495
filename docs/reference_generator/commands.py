# SPDX-License-Identifier: Apache-2.0
"""The `megatron-ext` command as Markdown: every subcommand with its usage and its options, from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from reference_generator.prose import as_markdown

__all__ = ["leaves", "markdown"]


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of the commands that do something, depth first."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for child in dict.fromkeys(action.choices.values()):
            yield from leaves(child)


def markdown(parser: argparse.ArgumentParser) -> str:
    """Return a section for every command."""
    return "\n".join(line for leaf in leaves(parser) for line in _section(leaf))


def _section(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (f"## {parser.prog}", "")
    if parser.description:
        yield from (as_markdown(" ".join(parser.description.split())), "")
    yield from ("```text", _usage(parser), "```", "")
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if not [action for action in shown if not isinstance(action, argparse._HelpAction)]:
            continue
        if group.title not in ("options", "positional arguments"):
            yield from (f"**{as_markdown(str(group.title))}**", "")
        for action in shown:
            if not isinstance(action, argparse._HelpAction):
                yield from (_name(parser, action), f": {_help(parser, action)}", "")


def _usage(parser: argparse.ArgumentParser) -> str:
    formatter = parser.formatter_class(parser.prog, width=110)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    return formatter.format_help().strip()


def _name(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    if not action.option_strings:
        return f"`{formatter._metavar_formatter(action, action.dest)(1)[0]}`"
    value = "" if action.nargs == 0 else " " + formatter._format_args(action, action.dest.upper())
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    told = as_markdown(" ".join(text.split()))
    is_told = re.search(r"\bdefault", text, re.IGNORECASE)
    default = action.default
    if not action.option_strings or is_told or isinstance(default, bool) or default in (None, [], "", "==SUPPRESS=="):
        return told or "(no help)"
    return f"{told} (default: `{default}`)"
