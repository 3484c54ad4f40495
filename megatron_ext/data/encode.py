# SPDX-License-Identifier: Apache-2.0
"""Documents to tokens, in batches, in this process or in several; the order never changes."""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.documents import (
    MAX_DOCUMENT_BYTES,
    ONE_TEXT,
    Document,
    Item,
    Problem,
    Skipped,
    TokenizedDocument,
)
from megatron_ext.data.json_values import JSON_DECODER, TOO_DEEP
from megatron_ext.data.tokenizers import Tokenizer, TokenizerSpec, token_dtype
from megatron_ext.data.tokenizing_processes import begin_process, result_of
from megatron_ext.errors import UserError

__all__ = ["EncodedBatch", "encode_all", "encode_batch", "text_of"]

_BATCH_BYTES = 1 << 20
_BATCH_ITEMS = 1000
_BATCHES_IN_FLIGHT_PER_PROCESS = 3


@dataclass(kw_only=True)
class EncodedBatch:
    """Tokens of consecutive documents."""

    tokens: NDArray[Any]
    """All documents one after the other, each with its end-of-document id; 1-D, uint16 or int32."""

    lengths: list[int]
    """Tokens of each document; they sum to `tokens.size`."""

    text_bytes: int = 0
    """Bytes of UTF-8 that the documents hold."""

    source_bytes: int = 0
    """Bytes of the input files that were worked off."""

    problems: list[Problem] = field(default_factory=list)
    """Bad input that was found, in order."""

    skipped: list[Skipped] = field(default_factory=list)
    """What was left out on purpose, in order."""


def text_of(document: Document, json_key: str) -> str | Problem:
    """Return a document's text, or its problem.

    A byte order mark says how the file was written that a text comes from, and is not part of it, nor of a record.
    """
    text = _text_of(document, json_key)
    return text.removeprefix("\ufeff") if isinstance(text, str) else text


def _text_of(document: Document, json_key: str) -> str | Problem:
    payload = document.payload
    if isinstance(payload, str):
        return payload

    def problem(message: str) -> Problem:
        return Problem(path=document.path, position=document.position, message=message)

    if not document.is_json:
        try:
            return payload.decode("utf-8")
        except UnicodeDecodeError as error:
            line = payload.count(b"\n", 0, error.start) + 1
            return Problem(
                path=document.path,
                position=f"line {line}",
                message=f"{_bad_byte(payload, error)} of the file",
            )

    if len(payload) > MAX_DOCUMENT_BYTES:
        return problem(f"line of {len(payload)} bytes is too long for one document; split the document")
    try:
        line_text = payload.decode("utf-8")
    except UnicodeDecodeError as error:
        return problem(f"{_bad_byte(payload, error)} of the line")
    try:
        row = JSON_DECODER.decode(line_text)
    except json.JSONDecodeError as error:
        return problem(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}; {ONE_TEXT}")
    except RecursionError:
        return problem(f"not usable JSON: {TOO_DEEP}; {ONE_TEXT}")
    if not isinstance(row, dict):
        way_out = "--format json takes each string as a document, " if isinstance(row, str) else ""
        expected = f"where an object with the key {json_key!r} is expected"
        return problem(f"JSON {_json_type(row)} {expected}; {way_out}{ONE_TEXT}")
    if json_key not in row:
        keys = ", ".join(repr(key) for key in list(row)[:8]) or "none"
        return problem(f"no key {json_key!r}; keys are {keys} (--jsonl-key); {ONE_TEXT}")
    text = row[json_key]
    if not isinstance(text, str):
        return problem(f"key {json_key!r} holds {_json_type(text)}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return problem(f"key {json_key!r} holds half a surrogate pair at character {error.start}")
    return text


def _bad_byte(data: bytes, error: UnicodeDecodeError) -> str:
    return f"not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def encode_batch(items: Sequence[Item], tokenizer: Tokenizer, json_key: str) -> EncodedBatch:
    """Tokenize consecutive items.

    A document of which no token is left is skipped; every other one ends with exactly one end-of-document
    id, which is added unless the tokenizer did so itself.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    batch = EncodedBatch(tokens=np.empty(0, dtype=dtype), lengths=[])
    documents: list[tuple[str, str | NDArray[Any]]] = []
    for item in items:
        if isinstance(item, Problem):
            batch.problems.append(item)
            continue
        if isinstance(item, Skipped):
            batch.skipped.append(item)
            continue
        batch.source_bytes += item.source_bytes
        text = _known_ids(item, tokenizer) if isinstance(item, TokenizedDocument) else text_of(item, json_key)
        if isinstance(text, Problem):
            batch.problems.append(text)
        elif len(text) == 0:
            batch.skipped.append(Skipped(reason="empty document", path=item.path))
        else:
            documents.append((item.path, text))

    eod = np.array([tokenizer.eod], dtype=dtype)
    pieces: list[NDArray[Any]] = []
    texts = [text for _, text in documents if isinstance(text, str)]
    encoded = iter(tokenizer.encode(texts) if texts else [])
    for path, text in documents:
        ids = next(encoded) if isinstance(text, str) else text
        if ids.size == 0 or (ids.size == 1 and ids[0] == tokenizer.eod):
            batch.skipped.append(Skipped(reason="empty document", path=path))
            continue
        pieces.append(ids.astype(dtype, copy=False))
        length = int(ids.size)
        if ids[-1] != tokenizer.eod:
            pieces.append(eod)
            length += 1
        batch.lengths.append(length)
        if isinstance(text, str):
            batch.text_bytes += len(text) if text.isascii() else len(text.encode("utf-8"))
    if pieces:
        batch.tokens = np.concatenate(pieces)
    return batch


def _known_ids(document: TokenizedDocument, tokenizer: Tokenizer) -> NDArray[Any] | Problem:
    """Return a document's ids, or its problem."""
    ids = document.ids
    wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if wrong.size:
        message = (
            f"has the id {int(wrong[0])}, and the tokenizer has {tokenizer.vocab_size:,}; give the one that they are "
            "of, and their type (--token-dtype)"
        )
        return Problem(path=document.path, position=document.position, message=message)
    return ids


def encode_all(
    items: Iterable[Item], spec: TokenizerSpec, *, json_key: str, workers: int
) -> Generator[EncodedBatch]:
    """Tokenize everything, in order.

    Args:
        items: What the readers yield; read here, in the calling process.
        spec: The tokenizer; every process loads its own.
        json_key: Key of the text in JSON lines.
        workers: Processes; 1 means the calling one. At most a few batches per process are in memory.

    Raises:
        UserError: The tokenizer cannot be used, or a process died.
    """
    batches = _in_batches(items)
    if workers == 1:
        tokenizer = spec.load()
        for batch in batches:
            yield encode_batch(batch, tokenizer, json_key)
        return

    # Spawned, not forked: this process may hold threads (of torch, of a tokenizer) that a fork would break.
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_process,
        initargs=(spec, json_key),
    )
    waiting: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            waiting.append(executor.submit(_encode_in_process, batch))
            if len(waiting) >= workers * _BATCHES_IN_FLIGHT_PER_PROCESS:
                yield result_of(waiting.popleft(), executor)
        while waiting:
            yield result_of(waiting.popleft(), executor)
    except BrokenProcessPool as error:
        raise UserError(
            "a tokenizing process died (killed for want of memory?); use fewer --workers"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _in_batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        if isinstance(item, Document):
            size += len(item.payload)
        elif isinstance(item, TokenizedDocument):
            size += item.ids.nbytes
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass
class _Process:
    """What one tokenizing process keeps between batches."""

    tokenizer: Tokenizer
    json_key: str


_process: _Process | None = None


def _start_process(spec: TokenizerSpec, json_key: str) -> None:
    """Prepare a tokenizing process."""
    global _process
    begin_process()
    _process = _Process(tokenizer=spec.load(), json_key=json_key)


def _encode_in_process(batch: list[Item]) -> EncodedBatch:
    assert _process is not None, "the initializer of the pool has run"
    return encode_batch(batch, _process.tokenizer, _process.json_key)
