# SPDX-License-Identifier: Apache-2.0
"""The whole job: files in, Megatron corpus out."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from megatron_ext.data.checks.largest_id import scan
from megatron_ext.data.discover import FileFormat, Inventory, find_sources
from megatron_ext.data.documents import Item, Problem
from megatron_ext.data.encode import encode_all
from megatron_ext.data.output import (
    check_prefix,
    output_paths,
    publish,
    read_sidecar,
    refuse_existing,
    refuse_foreign_description,
    staging_folder,
    why_not_reusable,
    write_sidecar,
)
from megatron_ext.data.progress import PrepareProgress
from megatron_ext.data.readers import read_documents
from megatron_ext.data.survey import Survey, refuse_unread, survey
from megatron_ext.data.token_ids import check_tokenizer
from megatron_ext.data.tokenizers import Tokenizer, TokenizerSpec, token_dtype
from megatron_ext.errors import UserError

__all__ = ["PrepareConfig", "Prepared", "prepare"]

_LISTED_PROBLEMS = 1000

_READING_RULES = 4
"""Changes when the same files and settings give other documents, so that `--reuse` does not keep the former ones.
2: content decides how a file is read; byte order marks are dropped. 3: JSON is never one text.
4: markup and what has a zero byte anywhere are no text; records have no byte order marks."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to make a corpus of, and how."""

    inputs: tuple[Path, ...]
    """Files and folders. The corpus holds them in this order; inside a folder files are sorted by the bytes
    of their relative path, inside a file documents keep their order."""

    output_prefix: str
    """PREFIX of the files PREFIX.bin, PREFIX.idx and PREFIX.json; its folder is made if need be."""

    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    """Byte-level unless a folder is named."""

    file_format: FileFormat | Literal["auto"] = "auto"
    """How to read every file; with `auto` its content decides (the rule is in `content.py`)."""

    token_dtype: str | None = None
    """Type of the ids with `file_format` tokens; None leaves it to their headers or records."""

    jsonl_key: str = "text"
    """Key of the text in JSON lines and other JSON records."""

    parquet_column: str = "text"
    """Column of the text in Parquet and Arrow files."""

    globs: tuple[str, ...] = ()
    """Patterns of the files to read inside folders; empty for all of them."""

    excludes: tuple[str, ...] = ()
    """Patterns of files and folders inside folders to leave out, of which each must be that of one."""

    usual_excludes: tuple[str, ...] = ()
    """More of them, which need not be."""

    on_error: Literal["fail", "skip"] = "fail"
    """Whether bad input and files that cannot be read end the run, with nothing written, or are left out, counted and
    listed."""

    shuffle_seed: int | None = None
    """Seed, 0 to 2**32 - 1, of a random order of all documents; None keeps the order of `inputs`."""

    workers: int = 1
    """Tokenizing processes; 1 means this one alone."""

    overwrite: bool = False
    """Whether output files of an earlier run may be replaced."""

    reuse: bool = False
    """Whether to do nothing if the output files were made from the same files with the same settings."""

    verbose: bool = False
    """Whether to name every file that is not read."""

    def settings(self) -> dict[str, Any]:
        """Return everything but the input files that decides about the output's bytes."""
        return {
            "format": self.file_format,
            "token_dtype": self.token_dtype,
            "jsonl_key": self.jsonl_key,
            "parquet_column": self.parquet_column,
            "globs": list(self.globs),
            "excludes": [*self.usual_excludes, *self.excludes],
            "on_error": self.on_error,
            "shuffle_seed": self.shuffle_seed,
        }

    def validate(self) -> None:
        """Refuse values that cannot work.

        Raises:
            UserError: Names every bad field.
        """
        wrong = []
        if not self.inputs:
            wrong.append("no input given; name files or folders, or use --stdlib")
        if self.token_dtype is not None and self.file_format != "tokens":
            wrong.append(f"--token-dtype {self.token_dtype}: is for --format tokens")
        if self.workers < 1:
            wrong.append(f"--workers {self.workers}: must be at least 1")
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < 2**32:
            wrong.append(f"--shuffle-documents {self.shuffle_seed}: must be from 0 to {2**32 - 1}")
        if wrong:
            raise UserError("; ".join(wrong))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The finished corpus."""

    prefix: Path
    """PREFIX of its files."""

    sidecar: dict[str, Any]
    """Content of PREFIX.json."""

    reused: bool
    """Whether it was there already."""

    seconds: float
    """Time taken, 0 if reused."""

    def megatron_args(self) -> list[str]:
        """Return the flags with which stock Megatron trains on the corpus."""
        return [*self.sidecar["megatron_args"], "--data-path", str(self.prefix)]


@dataclass(kw_only=True)
class _Tally:
    """What was seen, for the JSON file and the summary."""

    documents: int = 0
    tokens: int = 0
    largest_id: int = 0
    text_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    binary_suffixes: Counter[str] = field(default_factory=Counter)
    problem_count: int = 0
    problems: list[str] = field(default_factory=list)

    def add_problem(self, problem: Problem, on_error: str) -> None:
        """Count a problem, or end the run with it."""
        if on_error == "fail":
            raise UserError(f"{problem}; repair or leave out the input, or use --on-error skip")
        self.problem_count += 1
        if len(self.problems) < _LISTED_PROBLEMS:
            self.problems.append(str(problem))


def prepare(config: PrepareConfig, *, progress_stream: TextIO | None = None) -> Prepared:
    """Make a corpus, or find that it is there.

    Nothing appears under the output names before the corpus is complete, and an interrupted run leaves none.

    Args:
        config: What to do.
        progress_stream: Where the progress line goes; standard error by default.

    Raises:
        UserError: Bad input, bad settings, or an output that cannot be written.
    """
    config.validate()
    start = time.monotonic()
    with _output_errors(config.output_prefix):
        prefix = check_prefix(config.output_prefix)
    stream = sys.stderr if progress_stream is None else progress_stream
    own_outputs = [*output_paths(prefix).values(), prefix / "cache" / "GPTDataset_indices"]
    inventory = find_sources(
        config.inputs,
        globs=config.globs,
        excludes=(*config.usual_excludes, *config.excludes),
        file_format=config.file_format,
        own_outputs=frozenset(path.resolve() for path in own_outputs),
    )
    _refuse_unused_excludes(config, inventory)
    identity = {
        "inputs_digest": inventory.digest(),
        "tokenizer": {**asdict(config.tokenizer), "fingerprint": config.tokenizer.fingerprint()},
        "settings": config.settings(),
        "reading_rules": _READING_RULES,
    }
    # Readers turn their own OSErrors into problems, so that one which arrives here is the output's.
    with _output_errors(prefix):
        refuse_foreign_description(prefix)
        if config.reuse and _is_up_to_date(prefix, identity, config):
            return Prepared(prefix=prefix, sidecar=read_sidecar(prefix), reused=True, seconds=0.0)
        if not config.overwrite:
            refuse_existing(prefix)
        _refuse_no_files(config, inventory)
        if config.file_format == "tokens":
            check_tokenizer(config.tokenizer, [source.path for source in inventory.files])
        seen = survey(inventory)
        if config.verbose:
            stream.writelines(f"not read: {file}\n" for file in [*inventory.left_out, *seen.empty, *seen.unread])
        if config.on_error == "fail":
            refuse_unread(seen, inventory)
        with staging_folder(prefix) as folder:
            sidecar = _write(config, inventory, seen, folder, prefix.name, stream, identity)
            publish(folder, prefix)
    return Prepared(prefix=prefix, sidecar=sidecar, reused=False, seconds=time.monotonic() - start)


@contextlib.contextmanager
def _output_errors(prefix: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"output {prefix}: cannot be written: {error.strerror or error}") from error


def _is_up_to_date(prefix: Path, identity: dict[str, Any], config: PrepareConfig) -> bool:
    """Return whether the wanted corpus exists; refuse a different one unless it may be replaced."""
    if not any(path.exists() for path in output_paths(prefix).values()):
        return False
    difference = why_not_reusable(prefix, identity)
    if difference is not None and not config.overwrite:
        raise UserError(f"output {prefix} cannot be reused: {difference}; add --overwrite to make it again")
    return difference is None


def _refuse_unused_excludes(config: PrepareConfig, inventory: Inventory) -> None:
    """Refuse patterns that leave nothing out: one that is mistyped would let in what is to stay out."""
    for pattern in config.excludes:
        if pattern not in inventory.matched:
            rule = "the path inside an input folder" if "/" in pattern else "a name"
            raise UserError(
                f"--exclude {pattern} leaves nothing out: of no file or folder that is looked at does {rule} fit it "
                "(files given themselves, and what is in folders left out, are not looked at); correct it or leave "
                "it out"
            )


def _refuse_no_files(config: PrepareConfig, inventory: Inventory) -> None:
    if inventory.files or inventory.problems:
        return
    given = ", ".join(str(path) for path in config.inputs)
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(inventory.skipped.items()))
    raise UserError(
        f"input {given}: no file to read ({counts or 'the folder is empty'}); "
        "check the path, --glob and --exclude"
    )


def _write(
    config: PrepareConfig,
    inventory: Inventory,
    seen: Survey,
    folder: Path,
    name: str,
    stream: TextIO,
    identity: dict[str, Any],
) -> dict[str, Any]:
    """Write the three files into the staging folder and return the content of the JSON one."""
    from megatron_ext.data.writer import documents_of, open_writer, write_shuffled

    tokenizer = config.tokenizer.load()
    dtype = token_dtype(tokenizer.vocab_size)
    shuffled = config.shuffle_seed is not None
    first_name = f"{name}.in-order" if shuffled else name
    tally = _Tally(skipped=Counter(inventory.skipped))
    for problem in inventory.problems:
        tally.add_problem(problem, config.on_error)

    progress = PrepareProgress("tokenize", inventory.total_bytes, stream)
    batches = encode_all(
        _items(config, inventory, seen, tokenizer),
        config.tokenizer,
        json_key=config.jsonl_key,
        workers=config.workers,
    )
    with (
        contextlib.closing(progress),
        contextlib.closing(batches),
        open_writer(folder, first_name, dtype) as out,
    ):
        for batch in batches:
            for problem in batch.problems:
                tally.add_problem(problem, config.on_error)
            for skipped in batch.skipped:
                tally.skipped[skipped.reason] += 1
                if skipped.reason == "binary file":
                    tally.binary_suffixes[Path(skipped.path).suffix] += 1
            for document in documents_of(batch):
                out.add(document)
            if batch.tokens.size:
                tally.largest_id = max(tally.largest_id, int(batch.tokens.max()))
            tally.text_bytes += batch.text_bytes
            progress.advance(batch.source_bytes, len(batch.lengths))
    tally.documents, tally.tokens = out.documents, out.tokens
    if tally.documents == 0:
        _refuse_no_documents(tally)

    if config.shuffle_seed is not None:
        with contextlib.closing(PrepareProgress("shuffle", tally.tokens * dtype().itemsize, stream)) as progress:
            write_shuffled(folder, first_name, name, dtype, seed=config.shuffle_seed, progress=progress)

    sidecar = {
        "megatron_args": config.tokenizer.megatron_args(),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "largest_id": tally.largest_id,
        "output_digest": scan(str(folder / name)).digest,
        "tokenizer_digests": tokenizer.digests(),
        "dtype": dtype.__name__,
        "documents": tally.documents,
        "tokens": tally.tokens,
        "text_bytes": tally.text_bytes,
        "input_files": len(inventory.files),
        "input_bytes": inventory.total_bytes,
        "skipped": dict(sorted(tally.skipped.items())),
        "binary_suffixes": dict(sorted(tally.binary_suffixes.items())),
        "unread": [str(file) for file in seen.unread[:_LISTED_PROBLEMS]],
        "problem_count": tally.problem_count,
        "problems": tally.problems,
        "output_bytes": {suffix: (folder / f"{name}.{suffix}").stat().st_size for suffix in ("bin", "idx")},
        "inputs": [str(path) for path in config.inputs],
        **identity,
    }
    write_sidecar(folder / f"{name}.json", sidecar)
    return sidecar


def _items(config: PrepareConfig, inventory: Inventory, seen: Survey, tokenizer: Tokenizer) -> Iterator[Item]:
    """Yield everything the readers find, file after file."""
    return itertools.chain.from_iterable(
        read_documents(
            source,
            parquet_column=config.parquet_column,
            json_key=config.jsonl_key,
            token_dtype=config.token_dtype,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            content=content,
        )
        for source, content in zip(inventory.files, seen.contents, strict=True)
    )


def _refuse_no_documents(tally: _Tally) -> None:
    counts = [f"{count} {reason}" for reason, count in sorted(tally.skipped.items())]
    if tally.problem_count:
        counts.append(f"{tally.problem_count} unusable, the first: {tally.problems[0]}")
    raise UserError(f"no document with text was found in the input ({', '.join(counts)})")
