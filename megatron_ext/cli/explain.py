# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext explain`: what a command line of Megatron would do, before a GPU is used."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Say what a training command would do: whether Megatron and the features take it, which ranks belong
together, parameters, memory by cause, bytes sent per step and per round, what a checkpoint holds, and
how many patches are applied. Nothing is trained, read from --load or written, and no GPU is needed:
one rank of every kind is built by Megatron itself, without memory for its tensors.

What Megatron gets comes after `--`: the options that follow the script, which may be named too.
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
        "--nproc-per-node", "--nproc_per_node", type=int, default=1, metavar="N", help="ranks of a node (default: 1)"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="nodes (default: 1)")
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
    parser.set_defaults(func=run)


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
    if words and words[0].endswith(".py"):
        words = words[1:]
    asked = ExplainConfig(
        words=words,
        nproc_per_node=options.nproc_per_node,
        nnodes=options.nnodes,
        rank=options.rank,
        backend=options.backend,
    )
    with quietly():
        found = explain(asked)
    print(json.dumps(asdict(found), indent=2) if options.json else "\n".join(lines(found)))
    return 0
