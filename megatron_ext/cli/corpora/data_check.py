# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext data check`: whether corpora are whole, which vocabulary is theirs, and whether all ids are in it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Check corpora before training starts: that their files are whole, and that all ids are in the vocabulary.

The vocabulary is that of the record PREFIX.json, which `data prepare` writes. Corpora without one (of
Megatron's preprocess_data.py) need --tokenizer, --vocab-size, or --vocab-file and --merge-file, which with
a record have to agree with it. All tokens are read for the largest id and the record's digest, once: the
answer is kept in .NAME.largest_id.json until a file changes. Several corpora have to be of one
vocabulary. Without PREFIX, the vocabulary that is given is looked at alone. Prints the flags that
Megatron needs.
"""


def add_parser(commands: Any) -> None:
    """Add the command `check` to the commands of `data`.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser(
        "check",
        help="whether corpora are whole, and their ids in the vocabulary",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=run)
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX", help="of the .bin and .idx files")
    parser.add_argument(
        "--data-args-path", type=Path, metavar="FILE", help="a list of corpora, as `data list` writes it, instead"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="Hugging Face tokenizer: a folder, or a name of the hub such as org/model, which is looked for in the "
        "local cache",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let Python code inside the tokenizer folder run"
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids 0 to N-1, of which the last ends documents")
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT-2's tokenizer")
    parser.add_argument("--merge-file", metavar="FILE", help="its merges.txt")
    parser.add_argument(
        "--for-script",
        action="store_true",
        help="print only the tokenizer's flags, a word per line; errors name a launch script's variables (TOKENIZER, "
        "VOCAB_SIZE, VOCAB_FILE, MERGE_FILE, DATA_PATH)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `data check`.

    Raises:
        UserError: A corpus is incomplete, or of no vocabulary or another.
    """
    from megatron_ext.data.checks.vocabulary import VocabularyConfig, check_corpora
    from megatron_ext.data.manifest import read_manifest
    from megatron_ext.data.tokenizers import TokenizerSpec
    from megatron_ext.errors import UserError

    if args.trust_remote_code and args.tokenizer is None:
        raise UserError("--trust-remote-code has no meaning without --tokenizer")
    if args.prefixes and args.data_args_path is not None:
        raise UserError(f"PREFIX {args.prefixes[0]} and --data-args-path both name data; give one of them")
    prefixes = args.prefixes if args.data_args_path is None else read_manifest(args.data_args_path)
    spec = None
    if args.tokenizer is not None:
        spec = TokenizerSpec(folder=args.tokenizer, trust_remote_code=args.trust_remote_code)
    names: dict[str, Any] = {}
    if args.for_script:
        names = {
            "tokenizer_name": "TOKENIZER",
            "vocab_size_name": "VOCAB_SIZE",
            "files_names": ("VOCAB_FILE", "MERGE_FILE"),
            "data_name": "DATA_PATH",
        }
    given = VocabularyConfig(
        tokenizer=spec, vocab_size=args.vocab_size, vocab_file=args.vocab_file, merge_file=args.merge_file, **names
    )
    checked = check_corpora(prefixes, given, tell=_tell)
    if args.for_script:
        print("\n".join(checked.megatron_args))
        return 0
    for corpus in checked.corpora:
        counts = f"{corpus.sequences:,} sequences, {corpus.tokens:,} tokens"
        largest = "ids not looked at" if corpus.largest_id is None else f"no id above {corpus.largest_id:,}"
        print(f"{corpus.prefix}: {counts}, {largest}")
    if checked.known is not None:
        print(f"vocabulary: {checked.known.size:,} ids ({checked.known.said_by})")
    print("use with:")
    data = ["--data-path", *prefixes] if prefixes else []
    if args.data_args_path is not None:
        data = ["--data-args-path", str(args.data_args_path)]
    print(f"  {shlex.join([*checked.megatron_args, *data])}")
    return 0


def _tell(line: str) -> None:
    print(f"megatron-ext: {line}", file=sys.stderr, flush=True)
