# SPDX-License-Identifier: Apache-2.0
"""Reads files of token ids, as SPES and other OLMo-like trainers have them: named .npy, and mostly without a header.

Documents lie one after the other, each with its end-of-document id. What the ids are of says the record beside the
shards, PREFIXshards.json, where `tokenize_data` of this package has written them; else the user does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.compression import DamagedData, Stream
from megatron_ext.data.content import NPY_MAGIC
from megatron_ext.data.documents import ID_TYPES, MAX_DOCUMENT_BYTES, Item, Problem, Skipped, TokenizedDocument
from megatron_ext.data.tokenizers import TokenizerSpec
from megatron_ext.errors import UserError

__all__ = ["SHARDS_FORMAT", "ShardsRecord", "check_tokenizer", "read_token_ids", "record_of", "record_path"]

SHARDS_FORMAT = "megatron-ext token shards 1"
"""Value of the key `format` in a record."""

_SHARD_NAME = re.compile(r"(?P<prefix>.*)\d{3,}_\d{6,}\.npy")
_IDS_AT_ONCE = 1 << 22
_WHICH_TYPE = f"--token-dtype says which type they have ({', '.join(ID_TYPES)})"
_FEWEST_HALVES = 16
"""In this many ids or more, zeros in every second place are halves of wider ids; in fewer, they may end documents."""


@dataclass(frozen=True, kw_only=True)
class ShardsRecord:
    """What is written down of shards of token ids."""

    path: Path
    """Of the record itself."""

    dtype: str
    """One of `ID_TYPES`."""

    vocab_size: int
    """Number of ids."""

    eod: int
    """The id that ends documents."""

    tokens_digest: str
    """Of the tokenizer's tokens, as in `Tokenizer.digests`."""

    folder: str | None
    """Of the tokenizer; None for bytes."""


def record_path(prefix: str) -> Path:
    """Return where the record of shards with this prefix is."""
    return Path(f"{prefix}shards.json")


def record_of(shard: Path) -> ShardsRecord | None:
    """Return the record beside a shard; None without one.

    Raises:
        UserError: It is damaged.
    """
    found = _SHARD_NAME.fullmatch(shard.name)
    path = record_path(str(shard.parent / (found["prefix"] if found else "")))
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != SHARDS_FORMAT or content["dtype"] not in ID_TYPES:
            raise ValueError(f"format {content['format']!a}, dtype {content['dtype']!a}")
        return ShardsRecord(
            path=path,
            dtype=content["dtype"],
            vocab_size=int(content["vocab_size"]),
            eod=int(content["eod"]),
            tokens_digest=str(content["tokenizer_digests"]["tokens"]),
            folder=content["tokenizer"],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: is not a record of token shards ({error!r}); remove it, and give --tokenizer and --token-dtype"
        ) from error


def check_tokenizer(spec: TokenizerSpec, shards: Sequence[Path]) -> None:
    """Refuse ids of another tokenizer than the one that is given.

    Raises:
        UserError: They are, or nothing says which one they are of.
    """
    records = {path: record_of(path) for path in shards}
    unknown = next((path for path, record in records.items() if record is None), None)
    if unknown is not None and spec.folder is None:
        raise UserError(
            f"{unknown}: nothing says which tokenizer its ids are of, whose end of document tells documents apart; "
            "give --tokenizer"
        )
    tokenizer = spec.load()
    mine = (tokenizer.digests()["tokens"], tokenizer.eod)
    for path, record in records.items():
        if record is not None and (record.tokens_digest, record.eod) != mine:
            known = "bytes" if record.folder is None else f"the tokenizer {record.folder}"
            given = "bytes (no --tokenizer)" if spec.folder is None else f"--tokenizer {spec.folder}"
            raise UserError(f"{path}: its ids are of {known} ({record.path}), not of {given}; give that tokenizer")


def read_token_ids(
    stream: Stream, path: Path, size: int, *, dtype: str | None, vocab_size: int, eod: int
) -> Iterator[Item]:
    """Yield the documents of a file of ids.

    Without a record beside it the user alone says which tokenizer a file's ids are of, and without a header which type
    they have, and bytes of one type are numbers of every other: what they cannot be is a `Problem`, and no document.

    Args:
        stream: What the file holds.
        path: Of the file.
        size: Its bytes.
        dtype: As the user says it is; None leaves it to the header or the record.
        vocab_size: Number of ids of the tokenizer.
        eod: The id that ends documents. What follows the last one is a document, too.
    """
    name = str(path)
    try:
        kind = _type_of(stream, path, dtype, vocab_size)
        is_recorded = record_of(path) is not None
    except (ValueError, DamagedData) as error:
        yield Problem(path=name, position="", message=str(error))
        return
    open_end: list[NDArray[Any]] = []
    length = number = 0
    while True:
        try:
            data = stream.read(_IDS_AT_ONCE * kind.itemsize)
        except DamagedData as error:
            yield Problem(path=name, position="", message=str(error))
            return
        if len(data) % kind.itemsize:
            message = f"ends in the middle of an id of {kind.itemsize} bytes: it is truncated, or {_WHICH_TYPE}"
            yield Problem(path=name, position="", message=message)
            return
        ids = np.frombuffer(data, kind)
        pieces = np.split(ids, np.flatnonzero(ids == eod) + 1)
        for piece in pieces[:-1]:
            number += 1
            yield _document(name, number, [*open_end, piece], size if number == 1 else 0)
            open_end, length = [], 0
        if pieces[-1].size:
            open_end.append(pieces[-1])
            length += pieces[-1].size
        if length > MAX_DOCUMENT_BYTES:
            message = f"no end of document ({eod}) in {length} ids; is it of another tokenizer, or type of ids?"
            yield Problem(path=name, position=f"document {number + 1}", message=message)
            return
        if not data:
            break
    if open_end and number == 0 and not is_recorded:
        message = (
            f"none of its {length:,} ids is the end of document ({eod}): they are of another tokenizer or type; give "
            "theirs (--tokenizer, --token-dtype), or write that id after each document"
        )
        yield Problem(path=name, position="", message=message)
    elif open_end:
        yield _document(name, number + 1, open_end, size if number == 0 else 0)
    elif number == 0:
        yield Skipped(reason="empty file", path=name)


def _document(path: str, number: int, pieces: list[NDArray[Any]], source_bytes: int) -> TokenizedDocument:
    ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return TokenizedDocument(path=path, position=f"document {number}", ids=ids, source_bytes=source_bytes)


def _type_of(stream: Stream, path: Path, given: str | None, vocab_size: int) -> np.dtype[Any]:
    """Return the type of a file's ids, and pass over its header.

    Raises:
        ValueError: Nothing says it, or it is not one of ids, or two disagree, or it is not that of a vocabulary's ids.
    """
    if stream.peek(len(NPY_MAGIC)).startswith(NPY_MAGIC):
        kind = _type_in_header(stream, given)
    else:
        kind = _type_without_header(stream, path, given)
    if np.iinfo(kind).max < vocab_size - 1:
        raise ValueError(
            f"{kind.newbyteorder('=').name} holds no id above {np.iinfo(kind).max:,}, and the tokenizer has "
            f"{vocab_size:,}: they are of another tokenizer, or {_WHICH_TYPE}"
        )
    return kind


def _type_without_header(stream: Stream, path: Path, given: str | None) -> np.dtype[Any]:
    record = record_of(path)
    if record is not None and given not in (None, record.dtype):
        raise ValueError(f"--token-dtype is {given}, but {record.path} says {record.dtype}; leave that option out")
    name = given if record is None else record.dtype
    if name is None:
        raise ValueError(f"ids without a header, and without a record beside them; {_WHICH_TYPE}")
    kind = np.dtype(name).newbyteorder("<")
    head = stream.peek(kind.itemsize)
    ids = np.frombuffer(head, kind, count=len(head) // kind.itemsize)
    if record is None and ids.size >= _FEWEST_HALVES and not ids[1::2].any():
        raise ValueError(f"every second id is 0 if they are {name}, as if they were of a wider type; {_WHICH_TYPE}")
    return kind


def _type_in_header(stream: Stream, given: str | None) -> np.dtype[Any]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(stream)
    if len(shape) != 1 or kind.newbyteorder("=").name not in ID_TYPES:
        raise ValueError(f"its header says {kind} of shape {shape}, not one row of ids ({', '.join(ID_TYPES)})")
    if given not in (None, kind.newbyteorder("=").name):
        raise ValueError(f"--token-dtype is {given}, but its header says {kind.name}; leave that option out")
    return kind
