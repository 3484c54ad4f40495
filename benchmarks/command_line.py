# SPDX-License-Identifier: Apache-2.0
"""What the command lines of all benchmarks share: the parser, the options that many have, and what values may be.

What cannot be measured is refused before anything is: a benchmark may take hours, and its report comes last.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.cli.command_parser import CommandParser

__all__ = [
    "MOST_PROCESSES",
    "MOST_SEED",
    "EachOnce",
    "add_model_options",
    "add_report_option",
    "add_rounds_options",
    "add_seeds_option",
    "add_slow_by_option",
    "at_least",
    "benchmark_parser",
    "file_to_read",
    "folder_for_output",
    "folder_that_is_there",
    "number_above",
    "one_of",
    "picture",
    "require_memory",
    "writable",
]

MOST = 1_000_000
"""Of what is counted, unless an option says otherwise."""

MOST_PROCESSES = 64
"""That one machine is asked to run."""

MOST_SEED = 2**31 - 1
"""Megatron adds the rank's place to it, and NumPy takes 32 bits."""


class _PassingOn(CommandParser):
    """Reads the benchmark's own options, and returns the others, which are Megatron's."""

    def parse_known_args(  # type: ignore[override]  # the overloads of the original are of one shape
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Read the words, and return those that are not known besides."""
        return argparse.ArgumentParser.parse_known_args(self, args, namespace)


def benchmark_parser(name: str, about: str | None, *, passes_on: bool = False) -> CommandParser:
    """Return a parser without options.

    Args:
        name: of the module in this folder.
        about: its docstring.
        passes_on: whether `parse_known_args` returns options that are not known instead of refusing them.
    """
    kind = _PassingOn if passes_on else CommandParser
    return kind(
        prog=f"python -m benchmarks.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation of a benchmark's option may be one of Megatron's.
        allow_abbrev=not passes_on,
    )


def add_model_options(parser: argparse.ArgumentParser, *, pairs: int) -> None:
    """Add the sizes of a GPT, and how often something is measured with it.

    Args:
        parser: gets the options.
        pairs: measured pairs unless told otherwise.
    """
    parser.add_argument("--pairs", type=at_least(1), default=pairs, help=f"measured pairs ({pairs})")
    parser.add_argument("--warmup", type=at_least(0), default=2, help="pairs before those, not counted (2)")
    parser.add_argument("--layers", type=at_least(1), default=12, help="layers of the model (12)")
    parser.add_argument("--hidden", type=at_least(1), default=512, help="hidden size (512)")
    parser.add_argument("--vocab", type=at_least(1), default=32768, help="vocabulary (32768)")


def add_report_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json FILE`."""
    parser.add_argument(
        "--json", metavar="FILE", type=writable, help="write machine, versions and cases to FILE as well"
    )


def add_rounds_options(parser: argparse.ArgumentParser, methods: Sequence[str]) -> None:
    """Add how many workers make rounds, and of which methods.

    Args:
        parser: gets the options.
        methods: all of them.
    """
    parser.add_argument(
        "--workers",
        type=at_least(2, MOST_PROCESSES),
        nargs="+",
        action=EachOnce,
        default=[2, 4],
        help="numbers of workers (2 4)",
    )
    parser.add_argument(
        "--methods", choices=methods, nargs="+", action=EachOnce, default=methods, help="of rounds (both)"
    )


def add_slow_by_option(parser: argparse.ArgumentParser) -> None:
    """Add `--slow-by`."""
    parser.add_argument(
        "--slow-by",
        type=at_least(1, 1000),
        nargs="+",
        action=EachOnce,
        default=[2, 4],
        help="slowness of one worker (2 4)",
    )


def add_seeds_option(parser: argparse.ArgumentParser, of: str, *, nargs: str = "+") -> None:
    """Add `--seeds` of Megatron's runs, 1 to 3 unless given.

    Args:
        parser: gets the option.
        of: what has the seeds.
        nargs: "*" where there may be none.
    """
    parser.add_argument(
        "--seeds",
        type=at_least(1, MOST_SEED),
        nargs=nargs,
        action=EachOnce,
        default=[1, 2, 3],
        help=f"of {of} (1 2 3)",
    )


def at_least(minimum: int, most: int = MOST) -> Callable[[str], int]:
    """Return an argparse type: an integer of `minimum` to `most`."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too small; use {minimum} or more")
        if value > most:
            raise argparse.ArgumentTypeError(f"{value} is too large; use {most} or less")
        return value

    # argparse names the type where the text is not a number at all.
    parse.__name__ = "integer"
    return parse


def number_above(least: float, most: float, *, or_equal: bool = False) -> Callable[[str], float]:
    """Return an argparse type: a number above `least`, or equal to it where that may be, and `most` or less."""
    allowed = f"{least:g} to {most:g}" if or_equal else f"a number above {least:g}, {most:g} or less"

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (value == least and not or_equal):  # nor NaN
            raise argparse.ArgumentTypeError(f"{text} cannot be; use {allowed}")
        return value

    parse.__name__ = "number"
    return parse


def one_of(names: Collection[str], shown_by: str) -> Callable[[str], str]:
    """Return an argparse type: one of more names than an error can list.

    Args:
        names: all of them.
        shown_by: how to see them.
    """

    def parse(text: str) -> str:
        if text not in names:
            near = difflib.get_close_matches(text, names, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r}; {meant}{shown_by} shows all")
        return text

    return parse


class EachOnce(argparse.Action):
    """Take a list in which nothing is twice: what is repeated would count as a measurement of its own."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Set the list, or refuse it."""
        twice = [str(value) for value, count in Counter(values).items() if count > 1]
        if twice:
            raise argparse.ArgumentError(self, f"{', '.join(twice)} is given more than once; give each once")
        setattr(namespace, self.dest, values)


def writable(text: str) -> Path:
    """Return the path of a file that can be written; one that is there keeps what is in it, others are not made yet."""
    path = Path(text)
    try:
        if path.exists():
            path.open("a").close()
        else:
            _try_folder(path.parent)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: {error.strerror}; give a file in a folder that is there"
        ) from None
    return path


def picture(text: str) -> Path:
    """Return the path of a PNG that can be written."""
    if Path(text).suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text}: give a file whose name ends with .png")
    return writable(text)


def file_to_read(text: str) -> str:
    """Return the path of a file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file; give one that is there")
    return text


def folder_that_is_there(text: str) -> Path:
    """Return the path of a folder in which files can be made."""
    return _folder(Path(text), Path(text), "give a folder that is there and can be written")


def folder_for_output(text: str) -> Path:
    """Return the path of a folder in which files can be made, or that can be made itself; it is not made yet."""
    path = Path(text)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return _folder(path, there, "give a folder that can be written, or made")


def _folder(path: Path, there: Path, way_out: str) -> Path:
    try:
        _try_folder(there)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {there} cannot be used: {error.strerror}; {way_out}") from None
    return path


def _try_folder(folder: Path) -> None:
    """Make a file in a folder, which nobody else sees.

    Raises:
        OSError: it cannot be made.
    """
    tempfile.TemporaryFile(dir=folder).close()


def require_memory(parser: argparse.ArgumentParser, options: str, nbytes: float) -> None:
    """Refuse sizes that this machine has no memory for.

    Args:
        parser: says it.
        options: that decide about the sizes.
        nbytes: what all processes hold at once, roughly.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not math.isfinite(nbytes) or nbytes > machine:
        parser.error(
            f"{options}: with these all processes hold about {nbytes / 2**30:,.0f} GiB, and this machine has "
            f"{machine / 2**30:,.0f} GiB; give less"
        )
