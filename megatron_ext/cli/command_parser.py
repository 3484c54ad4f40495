# SPDX-License-Identifier: Apache-2.0
"""The parser of every command: what is mistyped is told by the command that it was given to, with what was meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self

from megatron_ext.phrases import meant_option

__all__ = ["CommandParser"]

_NEGATIVE = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
"""How a value begins that argparse would take for an option; its own expression misses -1e9 and -1,4,2."""


class CommandParser(argparse.ArgumentParser):
    """Reads the words of one command, and knows the others.

    Subcommands get a parser of this kind too. What one does not know it refuses itself, under its own name: argparse
    leaves that to the outermost parser, which has none of the command's options.
    """

    root: CommandParser | None = None
    """The outermost parser, once `join` was called on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make a parser as argparse does, to which a dash before a number is the number's sign.

        It takes no beginning of an option for the option: --peer, which is another command's, is not --peers.
        """
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._negative_number_matcher = _NEGATIVE

    def error(self, message: str) -> NoReturn:
        """End the program with one line. The usage, a page of it for most commands, is left to --help."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see {self.prog} --help\n")

    def join(self) -> Self:
        """Let the parsers of all subcommands know this one, so that they say where a command is."""
        for parser in self._below():
            parser.root = self
        return self

    def parse_known_args(  # type: ignore[override]  # the overloads of the original are of one shape
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Read the words, and end the program where one is not known."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            said = f"unrecognized arguments: {' '.join(unknown)}"
            hints = [self._meant(word, options) for word in unknown]
            self.error("; ".join([said, *dict.fromkeys(hint for hint in hints if hint)]))
        return options, unknown

    def _meant(self, word: str, options: argparse.Namespace) -> str | None:
        """Return what an unknown word is to be instead, or why it is none of the command's."""
        way_out: str | Callable[[str], str | None] | None = getattr(options, "of_unknown", None)
        said = way_out(word) if callable(way_out) else way_out
        if said is not None or not word.startswith("--"):
            return said
        return meant_option(word, self._option_string_actions)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown subcommand with the place where there is one of that name, or the nearest spelling."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            places = sorted(parser.prog for parser in (self.root or self)._below() if parser.prog.endswith(f" {value}"))
            near = difflib.get_close_matches(value, action.choices, n=1)
            meant = places or [f"{self.prog} {name}" for name in near]
            if meant:
                raise argparse.ArgumentError(None, f"{self.prog} has no {value!r}; did you mean {' or '.join(meant)}?")
        super()._check_value(action, value)

    def _below(self) -> Iterator[CommandParser]:
        """Yield the parsers of all subcommands, and of theirs."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield parser
                    yield from parser._below()
