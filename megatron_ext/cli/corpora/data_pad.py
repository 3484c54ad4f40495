# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext data pad`: a corpus whose documents fill rows of their own, for Megatron's own loader."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Fill every document of a corpus up to whole rows with its end of document, so that Megatron's own loader,
which packs documents into rows, has one document in a row, or a piece of a long one. With --eod-mask-loss
what was filled up counts nothing. This is how training without packing is measured against hot switching.
"""


def add_parser(commands: Any) -> None:
    """Add the command `pad` to the commands of `data`.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser(
        "pad",
        help="fill documents up to rows of their own",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=run)
    parser.add_argument("corpus", metavar="PREFIX", help="of the .bin and .idx files")
    parser.add_argument("--seq-length", type=int, required=True, metavar="N", help="tokens of a row, as in training")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="of the files that are made")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--reuse", action="store_true", help="keep what is there, if it was made of the same corpus")
    kept.add_argument("--overwrite", action="store_true", help="replace what is there")


def run(args: argparse.Namespace) -> int:
    """Run `data pad`.

    Raises:
        UserError: Bad input, or an output that cannot be written.
    """
    from megatron_ext.hot_switch.data.padded_corpus import PadConfig, pad_corpus

    padded = pad_corpus(
        PadConfig(
            corpus=args.corpus,
            seq_length=args.seq_length,
            output_prefix=args.output_prefix,
            reuse=args.reuse,
            overwrite=args.overwrite,
        )
    )
    positions = padded.rows * padded.seq_length
    done = " (up to date, nothing done)" if padded.reused else ""
    print(
        f"{padded.prefix}: {padded.rows:,} rows of {padded.seq_length:,} positions, of which {padded.predicted:,} "
        f"({padded.predicted / positions:.1%}) predict a token{done}"
    )
    print(f"tokens predicted in a row: {padded.predicted / padded.rows:.2f}")
    print("train with:")
    print(f"  {shlex.join(padded.megatron_args())}")
    return 0
