# SPDX-License-Identifier: Apache-2.0
"""The whole job of `tokenize_data`: files of texts in, shards of token ids out, and a record of them.

What it reads, and what it refuses, is as with `data prepare`. Each process has a share of the files, as in SPES' own
script, and writes shards of its own; within them the order is that of the files.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.data.content import Content, Unread
from megatron_ext.data.discover import SourceFile, find_sources
from megatron_ext.data.documents import ID_TYPES, Problem, Skipped, TokenizedDocument
from megatron_ext.data.encode import text_of
from megatron_ext.data.output import staging_folder
from megatron_ext.data.readers import read_documents
from megatron_ext.data.shards.shard_writer import ShardWriter, open_shards
from megatron_ext.data.survey import refuse_unread, survey
from megatron_ext.data.token_ids import SHARDS_FORMAT, record_path
from megatron_ext.data.tokenizers import Tokenizer, TokenizerSpec
from megatron_ext.data.tokenizing_processes import begin_process, result_of
from megatron_ext.errors import UserError

__all__ = ["TokenizeConfig", "Tokenized", "tokenize"]


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """What to tokenize, and how; the names of the fields are those of the script's options."""

    files: tuple[Path, ...]
    """Files of texts, in this order."""

    tokenizer: TokenizerSpec
    """Whose ids are written."""

    output_prefix: str
    """What the shards' paths begin with."""

    text_field: str = "text"
    """Key of the text in JSON, column in tables."""

    processes: int = 1
    """Processes, each with a share of the files."""

    batch_size: int = 500
    """Texts that the tokenizer gets at once."""

    max_shard_bytes: int = 4 << 30
    """Most bytes of a shard."""

    dtype: str = "uint32"
    """Type of an id on disk."""

    on_error: str = "fail"
    """`fail`, or `skip`: leave out and count what cannot be read."""

    overwrite: bool = False
    """Whether to replace the shards of an earlier run."""

    def validate(self) -> None:
        """Refuse values that cannot work.

        Raises:
            UserError: Names every bad field.
        """
        wrong = []
        if not self.files:
            wrong.append("--file_glob: no file matches; check the pattern, which the shell must not expand")
        for name in ("processes", "batch_size"):
            if getattr(self, name) < 1:
                wrong.append(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.dtype not in ID_TYPES:
            wrong.append(f"--dtype {self.dtype}: must be one of {', '.join(ID_TYPES)}")
        elif self.max_shard_bytes < np.dtype(self.dtype).itemsize:
            wrong.append(f"--max_shard_bytes {self.max_shard_bytes}: has no room for one id")
        if wrong:
            raise UserError("; ".join(wrong))


@dataclass(kw_only=True)
class Tokenized:
    """What was written, by one process or by all."""

    shards: dict[str, int] = field(default_factory=dict)
    """Ids of each file, by its name, in order."""

    documents: int = 0
    """Texts with an id or more."""

    largest_id: int = 0
    """Of all."""

    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> texts or files without a document."""

    problems: list[str] = field(default_factory=list)
    """What could not be read, with `on_error` skip."""

    def add(self, other: Tokenized) -> None:
        """Count in what another process has written."""
        self.shards.update(other.shards)
        self.documents += other.documents
        self.largest_id = max(self.largest_id, other.largest_id)
        self.left_out += other.left_out
        self.problems += other.problems


def tokenize(config: TokenizeConfig) -> Tokenized:
    """Write shards and their record: all of them, or none.

    Raises:
        UserError: Bad input or settings, ids that the type cannot hold, or an output that cannot be written.
    """
    config.validate()
    tokenizer = config.tokenizer.load("--tokenizer_name_or_path", special_tokens=False)
    _refuse_small_type(config, tokenizer)
    record = record_path(config.output_prefix)
    try:
        former = _former_shards(config.output_prefix)
        if former and not config.overwrite:
            raise UserError(f"{former[0]}: exists; use --overwrite to replace it, or another --output_prefix")
        inventory = find_sources(config.files)
        seen = survey(inventory)
        if config.on_error == "fail":
            refuse_unread(seen, inventory)
        shares = _shares(list(zip(inventory.files, seen.contents, strict=True)), config.processes)
        with staging_folder(record) as folder:
            done = Tokenized()
            for part in _run(config, tokenizer, folder, shares):
                done.add(part)
            if not done.documents:
                counts = ", ".join(f"{count} {reason}" for reason, count in sorted(done.left_out.items()))
                raise UserError(f"no document with text was found in {len(config.files)} files ({counts or 'none'})")
            _write_record(folder / record.name, config, tokenizer, done)
            # No record without its shards, and none of others.
            for path in (record, *former):
                path.unlink(missing_ok=True)
            for name in (*done.shards, record.name):
                os.replace(folder / name, record.with_name(name))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--output_prefix {config.output_prefix}: cannot be written: {reason}") from error
    return done


def _refuse_small_type(config: TokenizeConfig, tokenizer: Tokenizer) -> None:
    most = int(np.iinfo(config.dtype).max)
    if tokenizer.vocab_size - 1 <= most:
        return
    fitting = [name for name in ID_TYPES if np.iinfo(name).max >= tokenizer.vocab_size - 1]
    raise UserError(
        f"--dtype {config.dtype}: holds ids up to {most:,}, and the tokenizer has {tokenizer.vocab_size:,}, which "
        f"would wrap around; use {' or '.join(fitting[:2])}"
    )


def _former_shards(prefix: str) -> list[Path]:
    path = record_path(prefix)
    begin = path.name.removesuffix("shards.json")
    digits = [entry for entry in path.parent.glob("*.npy") if entry.name.startswith(begin)]
    return sorted(entry for entry in digits if entry.name[len(begin) :].removesuffix(".npy").replace("_", "").isdigit())


def _shares[T](items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Cut items into parts of one length, of which the first ones have one more where that is not even."""
    size, more = divmod(len(items), count)
    ends = [size * (number + 1) + min(number + 1, more) for number in range(count)]
    return [items[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


type _Share = Sequence[tuple[SourceFile, Content | Unread | None]]


def _run(config: TokenizeConfig, tokenizer: Tokenizer, folder: Path, shares: list[_Share]) -> Iterator[Tokenized]:
    """Yield what each process has written, in order."""
    if config.processes == 1:
        yield _write_share(config, folder, 0, shares[0], tokenizer)
        return
    # Spawned, not forked: this process may hold threads of a tokenizer that a fork would break.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(config.processes, mp_context=context, initializer=begin_process)
    waiting = [
        executor.submit(_write_share, config, folder, number, share) for number, share in enumerate(shares) if share
    ]
    # Private, because the pool does not show its processes.
    processes = list((executor._processes or {}).values())
    try:
        for future in waiting:
            yield result_of(future, executor)
    except BaseException as error:  # Ctrl-C too: what the others write is not kept
        for process in processes:
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise UserError("a tokenizing process died (killed for want of memory?); use fewer --processes") from error
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _write_share(
    config: TokenizeConfig, folder: Path, number: int, share: _Share, tokenizer: Tokenizer | None = None
) -> Tokenized:
    """Write the shards of one process."""
    tokenizer = tokenizer or config.tokenizer.load("--tokenizer_name_or_path", special_tokens=False)
    done = Tokenized()
    prefix = record_path(config.output_prefix).name.removesuffix("shards.json")
    kind = np.dtype(config.dtype).newbyteorder("<")
    with open_shards(folder, prefix, process=number, dtype=kind, most_bytes=config.max_shard_bytes) as writer:
        batch: list[str] = []
        for text in _texts(config, share, done):
            batch.append(text)
            if len(batch) == config.batch_size:
                _write_batch(batch, tokenizer, writer, done)
                batch = []
        _write_batch(batch, tokenizer, writer, done)
        done.shards = writer.tokens
    return done


def _texts(config: TokenizeConfig, share: _Share, done: Tokenized) -> Iterator[str]:
    """Yield the texts of files, without white space around them."""
    field_name = config.text_field
    for source, content in share:
        options: dict[str, Any] = {"parquet_column": field_name, "parquet_option": "--text_field"}
        for item in read_documents(source, json_key=field_name, content=content, **options):
            assert not isinstance(item, TokenizedDocument), "the format is as the file looks"
            if isinstance(item, Skipped):
                done.left_out[item.reason] += 1
                continue
            text = item if isinstance(item, Problem) else text_of(item, field_name)
            if isinstance(text, Problem):
                message = str(text).replace("--jsonl-key", "--text_field")
                if config.on_error == "fail":
                    raise UserError(f"{message}; repair or leave out the input, or use --on_error skip")
                done.problems.append(message)
            elif text.strip():
                yield text.strip()
            else:
                done.left_out["empty document"] += 1


def _write_batch(texts: list[str], tokenizer: Tokenizer, writer: ShardWriter, done: Tokenized) -> None:
    if not texts:
        return
    for ids in tokenizer.encode(texts):
        if ids.size == 0:
            done.left_out["empty document"] += 1
            continue
        document = np.append(ids, tokenizer.eod)
        writer.add(document)
        done.documents += 1
        done.largest_id = max(done.largest_id, int(document.max()))


def _write_record(path: Path, config: TokenizeConfig, tokenizer: Tokenizer, done: Tokenized) -> None:
    folder = config.tokenizer.folder
    content = {
        "format": SHARDS_FORMAT,
        "dtype": config.dtype,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "largest_id": done.largest_id,
        "tokenizer": None if folder is None else os.path.abspath(folder),
        "tokenizer_digests": tokenizer.digests(),
        "documents": done.documents,
        "shards": done.shards,
        "left_out": dict(sorted(done.left_out.items())),
        "problems": done.problems,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")
