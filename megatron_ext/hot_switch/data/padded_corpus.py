# SPDX-License-Identifier: Apache-2.0
"""Documents in rows of their own, for Megatron's own loader: filled up with their end, behind which no loss is taken.

Megatron cuts a corpus into rows of ``--seq-length`` tokens, whatever is in them. Where every document has a multiple
of that length, each row holds one document, or a piece of a long one, and with ``--eod-mask-loss`` what it was filled
up with counts nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.checks.largest_id import scan
from megatron_ext.data.corpus_files import check_corpus
from megatron_ext.data.output import (
    check_prefix,
    has_sidecar,
    publish,
    read_sidecar,
    refuse_existing,
    refuse_foreign_description,
    staging_folder,
    why_not_reusable,
    write_sidecar,
)
from megatron_ext.data.writer import open_writer
from megatron_ext.errors import UserError
from megatron_ext.quietly import quietly

__all__ = ["PadConfig", "Padded", "pad_corpus", "whole_rows"]


_OF_THE_VOCABULARY = ("tokenizer", "vocab_size", "eod", "tokenizer_digests")
"""What a corpus' record says that holds for its rows too."""


@dataclass(frozen=True, kw_only=True)
class PadConfig:
    """Which corpus to fill up, and to what."""

    corpus: str
    """PREFIX of the corpus (.bin and .idx), whose documents all end with the same id."""

    seq_length: int
    """Tokens of a row: Megatron's --seq-length."""

    output_prefix: str
    """PREFIX of the files PREFIX.bin, PREFIX.idx and PREFIX.json."""

    overwrite: bool = False
    """Replace what is there."""

    reuse: bool = False
    """Keep what is there if it was made of the same corpus."""


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A corpus of whole rows."""

    prefix: Path
    """PREFIX of its files."""

    rows: int
    """Of all documents."""

    predicted: int
    """Tokens that are predicted in all rows; the rest of the positions counts nothing."""

    seq_length: int
    """Positions of a row."""

    arguments: tuple[str, ...]
    """Megatron's vocabulary, where the record beside the corpus says it."""

    reused: bool
    """Whether it was there already."""

    def megatron_args(self) -> list[str]:
        """Return the flags with which stock Megatron trains on the rows."""
        return [
            *self.arguments,
            *("--seq-length", str(self.seq_length), "--eod-mask-loss", "--data-path", str(self.prefix)),
        ]


def whole_rows(tokens: NDArray[Any], seq_length: int) -> NDArray[Any]:
    """Return a document filled up to whole rows with its last token.

    Args:
        tokens: 1-D, of a document.
        seq_length: tokens of a row.
    """
    return np.pad(tokens, (0, -len(tokens) % seq_length), constant_values=tokens[-1])


def pad_corpus(config: PadConfig) -> Padded:
    """Write a corpus whose documents have whole rows.

    Nothing appears under the output names before it is complete.

    Raises:
        UserError: There is no whole corpus, its documents do not all end with the same id, a length below 2, or an
            output that exists or cannot be written.
    """
    if config.seq_length < 2:
        raise UserError(f"--seq-length {config.seq_length}: give 2 or more; a row predicts from its first token on")
    prefix = check_prefix(config.output_prefix)
    check_corpus(config.corpus, option="PREFIX")
    if prefix.resolve() == Path(config.corpus).resolve():
        raise UserError(f"--output-prefix {prefix}: is the corpus that is read, which would be replaced; give another")
    documents = _open(config.corpus)
    record = read_sidecar(config.corpus) if has_sidecar(Path(config.corpus)) else {}
    identity = {
        "padded_to": config.seq_length,
        "padded_from": {
            "tokens": int(documents.sequence_lengths.sum()),
            "digest": record.get("output_digest") or scan(config.corpus).digest,
        },
    }
    try:
        refuse_foreign_description(prefix)
        if config.reuse and why_not_reusable(prefix, identity) is None:
            made = read_sidecar(prefix)
            # A former release left out whose ids they are.
            if made.keys() >= record.keys() & set(_OF_THE_VOCABULARY):
                return _told(prefix, made, reused=True)
        if not config.overwrite:
            refuse_existing(prefix)
        with staging_folder(prefix) as folder:
            found = _write(documents, config, folder, prefix.name)
            content: dict[str, Any] = {
                "megatron_args": record.get("megatron_args", []),
                **{key: record[key] for key in _OF_THE_VOCABULARY if key in record},
                "largest_id": record.get("largest_id"),
                "dtype": np.dtype(documents.index.dtype).name,
                "output_digest": scan(str(folder / prefix.name)).digest,
                "output_bytes": {
                    suffix: (folder / f"{prefix.name}.{suffix}").stat().st_size for suffix in ("bin", "idx")
                },
                **found,
                **identity,
            }
            write_sidecar(folder / f"{prefix.name}.json", content)
            publish(folder, prefix)
    except OSError as error:
        raise UserError(f"output {prefix}: cannot be written: {error.strerror or error}") from error
    return _told(prefix, content, reused=False)


def _open(prefix: str) -> Any:
    with quietly():
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        return IndexedDataset(prefix)


def _write(documents: Any, config: PadConfig, folder: Path, name: str) -> dict[str, int]:
    """Write all documents, and return what they are."""
    bounds = documents.document_indices
    rows = predicted = written = 0
    end: int | None = None
    with open_writer(folder, name, documents.index.dtype) as writer:
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            tokens = np.concatenate([documents[index] for index in range(first, last)] or [np.empty(0, int)])
            if not tokens.size:
                continue
            end = int(tokens[-1]) if end is None else end
            if int(tokens[-1]) != end:
                raise UserError(
                    f"{config.corpus}: document {number} ends with id {int(tokens[-1])}, and those before it with "
                    f"{end}; give a corpus whose documents end with the tokenizer's end of document, as data prepare "
                    "makes them (Megatron's preprocess_data.py with --append-eod)"
                )
            row = whole_rows(tokens, config.seq_length)
            writer.add(row)
            rows += len(row) // config.seq_length
            predicted += tokens.size - 1
            written += row.size
    if not predicted:
        raise UserError(f"{config.corpus}: has no document of two or more tokens, so there is nothing to predict")
    return {"documents": writer.documents, "tokens": written, "rows": rows, "predicted": int(predicted)}


def _told(prefix: Path, content: dict[str, Any], *, reused: bool) -> Padded:
    return Padded(
        prefix=prefix,
        rows=content["rows"],
        predicted=content["predicted"],
        seq_length=content["padded_to"],
        arguments=tuple(content["megatron_args"]),
        reused=reused,
    )
