# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext data list`: the corpora of a folder in a file for --data-args-path."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
List the corpora (.bin and .idx) in folders and the folders in them in a file, one a line, with which
Megatron trains on all of them as one (--data-args-path FILE): each token counts as often as any other.
A weight before every path, as in `0.7 a 0.3 b`, changes that. Each corpus has to be whole; `data check
--data-args-path FILE` looks at vocabularies and ids, too.
"""


def add_parser(commands: Any) -> None:
    """Add the command `list` to the commands of `data`.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser(
        "list",
        help="list the corpora of a folder for --data-args-path",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=run)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="with .bin and .idx files")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the list; replaces a former one, and no other file"
    )


def run(args: argparse.Namespace) -> int:
    """Run `data list`.

    Raises:
        UserError: There is no corpus, or an incomplete one, or the list cannot be written.
    """
    from megatron_ext.data.manifest import corpora_in, write_manifest

    prefixes = corpora_in(args.folders)
    write_manifest(args.output, prefixes)
    print(f"{args.output}: {len(prefixes):,} {'corpus' if len(prefixes) == 1 else 'corpora'}")
    print("use with:")
    print(f"  --data-args-path {shlex.quote(str(args.output))}")
    return 0
