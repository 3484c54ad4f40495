# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext explain`: what a command line of Megatron would do, before a GPU is used."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Say what a training command would do: whether Megatron and the features take it, which ranks belong
together, parameters, memory by cause, bytes sent per step and per round, what a checkpoint holds, and
how many patches are applied. Nothing is trained, read from --load or written, and no GPU is needed:
one rank of every kind is built by Megatron itself, without memory for its tensors.

What Megatron gets comes after `--`: the options that follow the script, which may be named too, with
torchrun and its options before it, of which --nproc-per-node and --nnodes count here.
docs/explain.md says what is counted, and has the formulas of the rest.

Example:
  megatron-ext explain --nproc-per-node 8 --nnodes 8 -- pretrain_gpt.py --num-layers 32 ...
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "explain",
        help="say what a training command would do",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=int, metavar="N", help="ranks of a node (default: 1)"
    )
    parser.add_argument("--nnodes", type=int, metavar="N", help="nodes (default: 1)")
    parser.add_argument(
        "--rank", type=int, metavar="N", help="the rank to build (default: one of every kind of pipeline stage)"
    )
    parser.add_argument(
        "--backend",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where the run will be, which decides defaults and rules; not where this command runs (default: cuda)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- ARGS", help="what the training script gets")
    parser.set_defaults(
        func=run, of_unknown="what Megatron gets comes after --, as in: megatron-ext explain -- --num-layers 32"
    )


def run(options: argparse.Namespace) -> int:
    """Print the explanation.

    Raises:
        UserError: the command is not valid.
    """
    from megatron_ext.explain.config import ExplainConfig
    from megatron_ext.explain.explanation import explain
    from megatron_ext.explain.screen import lines
    from megatron_ext.quietly import quietly

    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    words, launched = _without_launcher(words)
    given = {"--nproc-per-node": options.nproc_per_node, "--nnodes": options.nnodes}
    numbers = {"--nproc-per-node": 1, "--nnodes": 1} | launched
    numbers |= {name: number for name, number in given.items() if number is not None}
    asked = ExplainConfig(
        words=words,
        nproc_per_node=numbers["--nproc-per-node"],
        nnodes=numbers["--nnodes"],
        rank=options.rank,
        backend=options.backend,
    )
    with quietly():
        found = explain(asked)
    print(json.dumps(asdict(found), indent=2) if options.json else "\n".join(lines(found)))
    return 0


def _without_launcher(words: list[str]) -> tuple[list[str], dict[str, int]]:
    """Return what the training script of a command line gets, and the numbers of ranks that its launcher is given.

    Raises:
        UserError: there is a launcher and no script, or a number that is none.
    """
    from megatron_ext.errors import UserError

    if not words or words[0].startswith("-"):
        return words, {}
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        raise UserError(
            f"{words[0]}: what Megatron gets follows a training script, and no word ends in .py; name one, as in: "
            "megatron-ext explain -- pretrain_gpt.py --num-layers 32"
        )
    numbers: dict[str, int] = {}
    before = [part for word in words[:script] for part in word.split("=", 1)]
    for name, value in itertools.pairwise(before):
        option = name.replace("_", "-")
        if option in ("--nproc-per-node", "--nnodes"):
            if not value.isdecimal():
                raise UserError(f"{name} {value}: is not a number of ranks or nodes to explain; give one")
            numbers[option] = int(value)
    return words[script + 1 :], numbers
