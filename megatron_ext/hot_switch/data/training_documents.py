# SPDX-License-Identifier: Apache-2.0
"""The documents that a run trains on: of Megatron's .bin/.idx files, conversations for --sft, or made-up ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_ext.data.corpus_files import check_corpus
from megatron_ext.data.split import parts_of
from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.conversations import Conversations, dataset_config
from megatron_ext.hot_switch.data.corpora import training_corpora
from megatron_ext.hot_switch.data.document_source import Counted, Documents, Tokens, require_rows

__all__ = ["IndexedDocuments", "JoinedDocuments", "MockDocuments", "open_documents"]


class IndexedDocuments(Documents):
    """The training part of a Megatron .bin/.idx pair, in the files' order.

    Like Megatron's GPT dataset this takes each of the file's sequences for a document.
    """

    def __init__(self, prefix: str, split: str, rows: int | None = None, *, option: str = "--data-path") -> None:
        """Open the files.

        Args:
            prefix: their path without .bin and .idx.
            split: Megatron's --split; the first part is for training.
            rows: of the vocabulary, below which tokens must be; None for any.
            option: what the user gives them by, for messages.

        Raises:
            UserError: a file is missing or incomplete, or no document is for training.
        """
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        check_corpus(prefix, option=option)
        self._file = IndexedDataset(prefix, multimodal=False, mmap=True)
        self._prefix, self._rows, self._option = prefix, rows, option
        count = len(self._file.sequence_lengths)
        begin, end = parts_of(count, split)[0] or (0, 0)
        if begin == end:
            raise UserError(f"--split {split}: {prefix} has no document for training; give the first part more")
        self._begin = begin
        self._lengths: Tokens = self._file.sequence_lengths[begin:end]

    @property
    def lengths(self) -> Tokens:
        """Tokens of each document."""
        return self._lengths

    def read(self, document: int, offset: int, count: int) -> Tokens:
        """Return `count` tokens of a document, from token `offset` on."""
        tokens: Tokens = self._file.get(self._begin + document, offset, count)
        where = f"{self._option} {self._prefix}: document {self._begin + document}"
        require_rows(tokens, self._rows, where)
        return tokens


class JoinedDocuments(Documents):
    """The documents of several corpora, numbered one corpus after the other.

    Attributes:
        corpora: the corpora.
        weights: share of each in the trained tokens; None where all are read as one corpus.
    """

    def __init__(self, corpora: Sequence[Documents], weights: Sequence[float] | None) -> None:
        """Number the documents.

        Args:
            corpora: at least one.
            weights: as many, or None.
        """
        self.corpora, self.weights = tuple(corpora), weights
        self._lengths: Tokens = np.concatenate([corpus.lengths for corpus in corpora])
        self._ends = np.cumsum([len(corpus.lengths) for corpus in corpora])

    @property
    def lengths(self) -> Tokens:
        """Tokens of each document."""
        return self._lengths

    def read(self, document: int, offset: int, count: int) -> Tokens:
        """Return `count` tokens of a document, from token `offset` on."""
        corpus, number = self._corpus_of(document)
        return corpus.read(number, offset, count)

    def counted(self, document: int, offset: int, count: int) -> Counted | None:
        """Return which of these tokens count in the loss where they are predicted; None where all of them do."""
        corpus, number = self._corpus_of(document)
        return corpus.counted(number, offset, count)

    def _corpus_of(self, document: int) -> tuple[Documents, int]:
        """Return the corpus that has a document, and the document's number there."""
        number = int(np.searchsorted(self._ends, document, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        return self.corpora[number], document - first


class MockDocuments(Documents):
    """Documents for --mock-data, most of them short, few of them long. Each counts in steps of its own."""

    COUNT = 10_000

    def __init__(self, *, longest: int, vocab_size: int, seed: int) -> None:
        """Decide the lengths.

        Args:
            longest: --seq-length; some documents are longer, and some have one token only.
            vocab_size: tokens are below it.
            seed: of lengths and tokens.
        """
        generator = np.random.default_rng(seed)
        spread = generator.lognormal(np.log(max(2.0, longest / 6)), 1.0, self.COUNT)
        self._lengths: Tokens = np.clip(spread.astype(np.int64), 1, 2 * longest)
        self._first = generator.integers(0, vocab_size, self.COUNT)
        self._step = generator.integers(1, 4, self.COUNT)
        self._vocab_size = vocab_size

    @property
    def lengths(self) -> Tokens:
        """Tokens of each document."""
        return self._lengths

    def read(self, document: int, offset: int, count: int) -> Tokens:
        """Return `count` tokens of a document, from token `offset` on."""
        tokens: Tokens = self._first[document] + self._step[document] * np.arange(offset, offset + count)
        return tokens % self._vocab_size


def open_documents(args: Any) -> Documents:
    """Return the documents that Megatron's arguments name.

    Raises:
        UserError: they cannot be read.
    """
    if args.sft:
        return _open_conversations(args)
    if args.mock_data:
        vocab_size = args.vocab_size or args.padded_vocab_size
        return MockDocuments(longest=args.seq_length, vocab_size=vocab_size, seed=args.seed)
    named = training_corpora(args)
    corpora = [
        IndexedDocuments(prefix, named.split, args.padded_vocab_size, option=named.option) for prefix in named.prefixes
    ]
    return JoinedDocuments(corpora, named.weights)


def _open_conversations(args: Any) -> Documents:
    named, config = training_corpora(args), dataset_config(args)
    corpora = [
        Conversations(path, named.split, config, args.padded_vocab_size, option=named.option) for path in named.prefixes
    ]
    return JoinedDocuments(corpora, named.weights)
