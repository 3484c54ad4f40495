# SPDX-License-Identifier: Apache-2.0
"""The options of `python -m tests.chaos`, and what is refused before anything is started."""

from __future__ import annotations

import argparse
import re
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.command_line import EachOnce, writable
from megatron_ext.cli.command_parser import CommandParser
from megatron_ext.errors import UserError

__all__ = ["check", "flags_of_kind", "make_parser"]

_MOST_FAULTS = 36_000
"""Of an hour: what is more often than ten a second cannot begin at its time."""
_MOST_MINUTES = 7 * 24 * 60
_MOST_RUNS = 1000
"""Of one call, and to shrink a schedule with."""
_MOST_SHARDS = 2
_MOST_SEED = (1 << 63) - 1
"""That torch's generator takes."""

_DIR = (
    "an empty folder for all files of the run, which stay there, each of several runs in one of its own (one in the "
    "system's temporary folder, removed where no rule was violated)"
)


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """Return the parser, whose `seeds` is a list for either spelling."""
    parser = CommandParser(prog="python -m tests.chaos", description=about)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--seed",
        dest="seeds",
        type=int,
        nargs=1,
        action=_Seeds,
        metavar="S",
        help="decides the settings, the data and the faults",
    )
    which.add_argument(
        "--seeds",
        type=_seeds,
        nargs="+",
        action=_Seeds,
        metavar="S",
        help="a run with each of these, one after the other: 7 9 or 100-109",
    )
    parser.add_argument("--jobs", action="store_true", help="peers that are Megatron jobs, instead of synthetic ones")
    parser.add_argument("--experts", action="store_true", help="let each peer train only some experts (SPES)")
    parser.add_argument("--tls", action="store_true", help="encrypt everything, and ask for a token and certificates")
    parser.add_argument("--guards", action="store_true", help="judge and weight contributions by their norms (EDiT)")
    parser.add_argument(
        "--shards", type=int, default=1, metavar="N", help="servers that share the values among them, 1 or 2 (1)"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="how long faults happen, for each seed (3)")
    parser.add_argument(
        "--faults-per-hour",
        type=float,
        default=600.0,
        help="how many are drawn in the mean; one that would strike what another one still strikes is left out (600)",
    )
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="the faults of this file instead")
    parser.add_argument("--dir", type=Path, help=_DIR)
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the figures there too (a list of several)")
    parser.add_argument("--table", action="store_true", help="print a row for each seed and fault instead, in Markdown")
    parser.add_argument("--shrink", type=int, default=0, metavar="N", help="runs to shrink a failing schedule with (0)")
    return parser


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot be run.

    Raises:
        UserError: names the option and the way out.
    """
    for name, value in (("--minutes", options.minutes), ("--faults-per-hour", options.faults_per_hour)):
        if not 0 < value < float("inf"):
            raise UserError(f"{name} is {value}; it must be above 0")
    if options.minutes > _MOST_MINUTES:
        raise UserError(f"--minutes is {options.minutes:g}; give {_MOST_MINUTES} (a week) or less")
    for seed in options.seeds:
        if not 0 <= seed <= _MOST_SEED:
            raise UserError(f"--seed is {seed}; give 0 to 2^63 - 1")
    if options.faults_per_hour > _MOST_FAULTS:
        raise UserError(f"--faults-per-hour is {options.faults_per_hour:g}; give {_MOST_FAULTS} (ten a second) or less")
    if not 1 <= options.shards <= _MOST_SHARDS:
        raise UserError(f"--shards is {options.shards}; give 1 to {_MOST_SHARDS}: the model has as many tensors")
    for option in flags_of_kind(options):
        if options.jobs and option != "--jobs":
            raise UserError(f"{option} is for synthetic peers; drop it, or --jobs")
    if not 0 <= options.shrink <= _MOST_RUNS:
        raise UserError(f"--shrink is {options.shrink}; give 0 to {_MOST_RUNS}")


def flags_of_kind(options: argparse.Namespace) -> list[str]:
    """Return the flags that say what kind of run a seed stands for."""
    said = {
        "--jobs": options.jobs,
        "--guards": options.guards,
        "--experts": options.experts,
        "--tls": options.tls,
        f"--shards {options.shards}": options.shards > 1,
    }
    return [flag for flag, is_given in said.items() if is_given]


def _seeds(text: str) -> range:
    """Return the seeds of a word."""
    found = re.fullmatch(r"(\d{1,20})(?:-(\d{1,20}))?", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a seed nor a range of them; give 7 or 100-109")
    first = int(found[1])
    last = int(found[2] or first)
    if last < first:
        raise argparse.ArgumentTypeError(f"{text} goes from high to low; give {last}-{first}")
    if last - first >= _MOST_RUNS:
        raise argparse.ArgumentTypeError(f"{text} has {last - first + 1} seeds; give {_MOST_RUNS} or fewer")
    return range(first, last + 1)


class _Seeds(EachOnce):
    """Takes seeds and ranges of them, each once; a second `--seed` would take the place of the first in silence."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Set the list, or refuse it."""
        if getattr(namespace, self.dest, None):
            raise argparse.ArgumentError(self, "is given more than once; give several seeds as --seeds 7 9 or 100-109")
        seeds = list(chain.from_iterable(word if isinstance(word, range) else (word,) for word in values))
        super().__call__(parser, namespace, seeds, option_string)
