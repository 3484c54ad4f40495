# SPDX-License-Identifier: Apache-2.0
r"""Tokenize texts into shards of ids (.npy, without a header), with the options of SPES' own tokenize_data.py.

    python examples/spes/tokenize_data.py --file_glob "data/*.jsonl" --tokenizer_name_or_path TOKENIZER_DIR \
        --output_prefix tokenized/tokens_
    megatron-ext data prepare tokenized --format tokens --tokenizer TOKENIZER_DIR --output-prefix corpus

Reads what `megatron-ext data prepare` reads, plain or compressed, and refuses what that refuses. The second command
makes Megatron's corpus of the shards; where nothing else needs them, `data prepare` makes it of the texts at once.
"""

import argparse
import glob
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started by its path, a script knows only its folder

from megatron_ext.data.checks.given_vocabulary import folder_of
from megatron_ext.data.documents import ID_TYPES
from megatron_ext.data.shards.tokenize_texts import TokenizeConfig, tokenize
from megatron_ext.data.token_ids import record_path
from megatron_ext.data.tokenizers import TokenizerSpec
from megatron_ext.errors import UserError

SHOWN_PROBLEMS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the shards; return 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="tokenize_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--file_glob", default="./data/*", help="pattern of the files; ** is any number of folders (./data/*)")
    add("--tokenizer_name_or_path", required=True, help="its folder, or a name in the hub's cache")
    add("--output_prefix", required=True, help="what the files' paths begin with, as in tokenized/tokens_")
    add("--text_field", default="text", help="key of the text in JSON, column in Parquet and Arrow (text)")
    add("--processes", type=int, default=1, help="each takes a share of the files (1)")
    add("--batch_size", type=int, default=500, help="texts that the tokenizer gets at once (500)")
    add("--max_shard_bytes", type=int, default=4 << 30, help="most bytes of a file (4294967296)")
    add("--dtype", default="uint32", choices=ID_TYPES, help="type of an id, which must hold all of them (uint32)")
    add("--on_error", default="fail", choices=("fail", "skip"), help="what to do with input that is not read (fail)")
    add("--overwrite", action="store_true", help="replace the shards of an earlier run")
    options = parser.parse_args(arguments)
    try:
        folder = folder_of(options.tokenizer_name_or_path, "--tokenizer_name_or_path")
        config = TokenizeConfig(
            files=tuple(sorted(Path(name) for name in glob.glob(options.file_glob, recursive=True) if is_file(name))),
            tokenizer=TokenizerSpec(folder=folder),
            output_prefix=options.output_prefix,
            text_field=options.text_field,
            processes=options.processes,
            batch_size=options.batch_size,
            max_shard_bytes=options.max_shard_bytes,
            dtype=options.dtype,
            on_error=options.on_error,
            overwrite=options.overwrite,
        )
        done = tokenize(config)
    except UserError as error:
        print(f"tokenize_data: error: {error}", file=sys.stderr)
        return 2
    for problem in done.problems[:SHOWN_PROBLEMS]:
        print(f"left out: {problem}")
    if len(done.problems) > SHOWN_PROBLEMS:
        print(f"left out: {len(done.problems) - SHOWN_PROBLEMS:,} more")
    for reason, count in sorted(done.left_out.items()):
        print(f"left out: {count:,} {reason}")
    print(f"{done.documents:,} documents, {sum(done.shards.values()):,} tokens in {len(done.shards):,} files")
    print(f"their names, type and tokenizer are in {record_path(options.output_prefix)}")
    return 0


def is_file(name: str) -> bool:
    """Return whether a match of the pattern is a file, and not a folder, which the pattern's ** enters."""
    return not Path(name).is_dir()


if __name__ == "__main__":
    sys.exit(main())
