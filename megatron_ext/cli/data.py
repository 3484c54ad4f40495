# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext data prepare`: text, code, JSON, Parquet or Arrow to Megatron's .bin/.idx."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from megatron_ext.cli.corpora import data_check, data_list, data_pad
from megatron_ext.cli.ending import ended_by_sigterm
from megatron_ext.data.documents import ID_TYPES
from megatron_ext.errors import UserError

__all__ = ["add_parser", "run"]

_LISTED_PROBLEMS = 20

_PLURALS = {
    "binary file": "binary files",
    "device, pipe or socket": "devices, pipes or sockets",
    "description of another corpus": "descriptions of other corpora",
    "empty document": "empty documents",
    "empty file": "empty files",
    "excluded": "files or folders excluded",
    "file already read under another name": "files already read under another name",
    "folder already read through another link": "folders already read through another link",
    "hidden": "hidden files or folders",
    "not matching --glob": "files not matching --glob",
    "output of this command": "outputs of this command",
}
"""Reasons for leaving something out, as a count of them reads in the summary."""

_DESCRIPTION = """\
Turn text, code, JSON lines, JSON arrays, Parquet or Arrow, each of them plain or compressed with gzip,
bzip2, xz or zstd, into PREFIX.bin and PREFIX.idx, which stock Megatron reads with --data-path PREFIX, and
PREFIX.json, which describes their content.

A text or code file is one document; so is each JSON line, each element of a JSON array, and each row.
Every document ends with an end-of-document token. Without --tokenizer the tokens are the bytes of the
text. The flags that Megatron needs are printed at the end.
"""

_EPILOG = """\
What a file holds decides how it is read:
  - compressed files, Parquet and Arrow are known by their first bytes;
  - JSON is what has a name that ends in .json, .jsonl or .ndjson, and what begins with {" or [{ whatever
    its name: one record per line, the elements of an array, or objects over several lines. It is never one
    text: what is not a record with the text's key (--jsonl-key) is an error that names it. For a folder of
    code with files such as package.json use --format text, or --exclude '*.json'. Where an object has a key
    twice, the last one counts;
  - everything else without a zero byte near its start is text: code, Markdown.
Names that end in .jsonl, .parquet or .arrow and similar are read as what they promise.

Order: inputs as given; inside a folder, files sorted by relative path; inside a file, as found.
Megatron's --split cuts this order into training, validation and test documents, so that the
validation set is the end of the corpus. Use --shuffle-documents unless that is what you want.

Hidden files and empty files in folders are left out and counted. All other input that is not read
(binary files, archives, damaged, unreadable or unusable ones) ends the run with status 2 before
anything is written, unless it is left out by --glob or --exclude, or --on-error skip is given.

Example:
  megatron-ext data prepare ~/src --glob '*.py' --shuffle-documents 1 --output-prefix data/code
"""


def add_parser(subparsers: Any) -> None:
    """Add the command `data` to the command line.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    data = subparsers.add_parser("data", help="make training data", description="Make training data.")
    commands = data.add_subparsers(dest="data_command", metavar="COMMAND", required=True)
    data_check.add_parser(commands)
    data_list.add_parser(commands)
    data_pad.add_parser(commands)
    parser = commands.add_parser(
        "prepare",
        help="text, code, JSON, Parquet or Arrow to Megatron's .bin/.idx",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=run)

    source = parser.add_argument_group("input")
    source.add_argument("inputs", nargs="*", type=Path, metavar="PATH", help="files and folders")
    source.add_argument(
        "--stdlib",
        action="store_true",
        help="use the source of this Python's standard library (some 30 MB); implies --glob '*.py', "
        "--on-error skip and --shuffle-documents 1234 unless these are given",
    )
    source.add_argument(
        "--glob",
        action="append",
        default=[],
        metavar="PATTERN",
        help="read only matching files inside folders; may be repeated. Without a / the pattern is "
        "matched against the file name, with one against the path inside the folder (/NAME: at its top)",
    )
    source.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out matching files and folders inside folders; may be repeated. One that fits nothing is refused",
    )
    source.add_argument(
        "--format",
        choices=("auto", "text", "jsonl", "json", "parquet", "arrow", "tokens"),
        default="auto",
        help="how to read all files, or what they hold compressed; auto (default): as they look, see below. json is an "
        "array of records (or strings), or records one after the other; tokens are files of ids (.npy) that "
        "--tokenizer gives, and implies --glob '*.npy' unless that is given",
    )
    source.add_argument(
        "--token-dtype",
        choices=ID_TYPES,
        help="type of the ids with --format tokens (default: as the file's header or the record beside it says)",
    )
    source.add_argument(
        "--jsonl-key", default="text", metavar="KEY", help="key of the text in JSON records (default: text)"
    )
    source.add_argument(
        "--parquet-column",
        default="text",
        metavar="NAME",
        help="column of the text in Parquet and Arrow (default: text)",
    )
    source.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        help="fail (default): input that is not read, or the first unusable document, ends the run; skip: leave it "
        "out, count and list it",
    )
    source.add_argument(
        "--verbose",
        action="store_true",
        help="name every file that is not read, also hidden and empty ones and what --glob and --exclude leave out",
    )

    tokens = parser.add_argument_group("tokens")
    tokens.add_argument(
        "--tokenizer", metavar="DIR", help="Hugging Face tokenizer folder (default: one token per byte)"
    )
    tokens.add_argument(
        "--trust-remote-code", action="store_true", help="let Python code inside the tokenizer folder run"
    )
    tokens.add_argument(
        "--workers", type=int, default=1, metavar="N", help="tokenizing processes (default: 1, this one)"
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="write PREFIX.bin, PREFIX.idx and PREFIX.json",
    )
    output.add_argument(
        "--shuffle-documents", type=int, metavar="SEED", help="put all documents in a random order"
    )
    output.add_argument("--overwrite", action="store_true", help="replace the output of an earlier run")
    output.add_argument(
        "--reuse",
        action="store_true",
        help="do nothing if PREFIX was made from the same files with the same settings (with --overwrite: "
        "otherwise make it again)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `data prepare`.

    Returns:
        The exit status: 0, or 130 if interrupted.

    Raises:
        UserError: Bad input or settings.
    """
    from megatron_ext.data.prepare import prepare

    try:
        with ended_by_sigterm():
            result = prepare(_config(args))
    except KeyboardInterrupt:
        print("megatron-ext: interrupted, no output written", file=sys.stderr)
        return 130
    _print_summary(result)
    return 0


def _config(args: argparse.Namespace) -> Any:
    """Build the configuration from the flags."""
    from megatron_ext.data.prepare import PrepareConfig
    from megatron_ext.data.stdlib_corpus import (
        STDLIB_EXCLUDES,
        STDLIB_GLOBS,
        STDLIB_SHUFFLE_SEED,
        standard_library_sources,
    )
    from megatron_ext.data.tokenizers import TokenizerSpec

    if args.trust_remote_code and args.tokenizer is None:
        raise UserError("--trust-remote-code has no meaning without --tokenizer")
    inputs, globs = tuple(args.inputs), tuple(args.glob)
    usual_excludes: tuple[str, ...] = ()
    on_error: Literal["fail", "skip"] = args.on_error or ("skip" if args.stdlib else "fail")
    seed = args.shuffle_documents
    if args.stdlib:
        if inputs:
            raise UserError(f"--stdlib and the input {inputs[0]} exclude each other")
        inputs = (standard_library_sources(),)
        globs = globs or STDLIB_GLOBS
        usual_excludes = STDLIB_EXCLUDES
        seed = STDLIB_SHUFFLE_SEED if seed is None else seed
    if args.format == "tokens":
        globs = globs or ("*.npy",)
    return PrepareConfig(
        inputs=inputs,
        output_prefix=args.output_prefix,
        tokenizer=TokenizerSpec(folder=_from_anywhere(args.tokenizer), trust_remote_code=args.trust_remote_code),
        file_format=args.format,
        token_dtype=args.token_dtype,
        jsonl_key=args.jsonl_key,
        parquet_column=args.parquet_column,
        globs=globs,
        excludes=tuple(args.exclude),
        usual_excludes=usual_excludes,
        on_error=on_error,
        shuffle_seed=seed,
        workers=args.workers,
        overwrite=args.overwrite,
        reuse=args.reuse,
        verbose=args.verbose,
    )


def _from_anywhere(folder: str | None) -> str | None:
    """Return a path of the same folder that holds in other folders, too: it is written next to the corpus."""
    return os.path.abspath(folder) if folder is not None and os.path.isdir(folder) else folder


def _print_summary(result: Any) -> None:
    from megatron_ext.data.progress import megabytes
    from megatron_ext.data.split import MEGATRONS_SPLIT, advised_split, parts_without_documents

    facts = result.sidecar
    if result.reused:
        print(f"{result.prefix}: up to date, nothing done")
    else:
        size = megabytes(facts["output_bytes"]["bin"])
        print(f"{result.prefix}.bin, .idx, .json: {size} of {facts['dtype']} in {result.seconds:.1f} s")
    print(
        f"  {facts['documents']:,} documents, {facts['tokens']:,} tokens, "
        f"{megabytes(facts['text_bytes'])} of text from {facts['input_files']:,} files"
    )
    for reason, count in facts["skipped"].items():
        suffixes = [f"{suffix or 'no suffix'} {n}" for suffix, n in facts["binary_suffixes"].items()]
        detail = f" ({', '.join(suffixes)})" if reason == "binary file" else ""
        print(f"  left out: {count:,} {reason if count == 1 else _PLURALS.get(reason, reason)}{detail}")
    if facts["problem_count"]:
        print(f"  left out: {facts['problem_count']:,} unusable:")
        for problem in facts["problems"][:_LISTED_PROBLEMS]:
            print(f"    {problem}")
        if facts["problem_count"] > _LISTED_PROBLEMS:
            print(f"    ... more in {result.prefix}.json")
    if facts["settings"]["shuffle_seed"] is None:
        print("  documents are in input order: --split takes validation and test from the end")
    if parts_without_documents(facts["documents"], MEGATRONS_SPLIT):
        print(
            f"  warning: too few documents for Megatron's default --split {MEGATRONS_SPLIT}, which leaves a part "
            f"empty; use --split {advised_split(facts['documents'])}, or fewer and larger parts"
        )
    print("use with:")
    print(f"  {shlex.join(result.megatron_args())}")
