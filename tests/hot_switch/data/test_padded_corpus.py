# SPDX-License-Identifier: Apache-2.0
"""Documents filled up to rows, on which Megatron's own loader trains what hot switching does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.checks.vocabulary import VocabularyConfig, check_corpora
from megatron_ext.data.output import read_sidecar
from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.padded_corpus import PadConfig, pad_corpus, whole_rows
from tests.hot_switch.runs import COMMON, assert_equal_except_for_rounding, full_parameters, hot_run
from tests.support.corpus import make, read_corpus, write_without_record
from tests.support.presets import Options, toy_gpt
from tests.support.pretrain import run_pretrain

END, ROW = 126, 32


def padded(corpus: Path, prefix: Path, **settings: bool) -> list[list[int]]:
    pad_corpus(PadConfig(corpus=str(corpus), seq_length=8, output_prefix=str(prefix), **settings))
    return read_corpus(prefix)


def test_every_document_gets_whole_rows_and_keeps_its_tokens(tmp_path: Path) -> None:
    documents = [[1, 2, 9], [3] * 7 + [9], [4] * 8 + [9]]
    write_without_record(tmp_path / "corpus", documents)
    rows = padded(tmp_path / "corpus", tmp_path / "rows")
    assert [len(row) for row in rows] == [8, 8, 16]
    assert [row[: len(document)] for row, document in zip(rows, documents, strict=True)] == documents
    assert {token for row, document in zip(rows, documents, strict=True) for token in row[len(document) :]} == {9}
    record = read_sidecar(tmp_path / "rows")
    assert (record["rows"], record["predicted"], record["tokens"]) == (4, 2 + 7 + 8, 32)


def test_the_record_of_the_vocabulary_goes_along(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    make(tmp_path / "text", tmp_path / "corpus")
    found = pad_corpus(PadConfig(corpus=str(tmp_path / "corpus"), seq_length=8, output_prefix=str(tmp_path / "rows")))
    assert found.megatron_args() == [
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257"),
        *("--seq-length", "8", "--eod-mask-loss", "--data-path", str(tmp_path / "rows")),
    ]


def test_rows_are_checked_as_the_corpus_is_that_they_are_of(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    make(tmp_path / "text", tmp_path / "corpus")
    padded(tmp_path / "corpus", tmp_path / "rows")
    corpus, rows = (
        check_corpora([str(tmp_path / name)], VocabularyConfig(), tell=print) for name in ("corpus", "rows")
    )
    assert corpus.megatron_args == rows.megatron_args
    # Nothing says which vocabulary these are of, and the rows say as much.
    write_without_record(tmp_path / "foreign", [[1, 9]])
    padded(tmp_path / "foreign", tmp_path / "foreign_rows")
    for name in ("foreign", "foreign_rows"):
        found = check_corpora([str(tmp_path / name)], VocabularyConfig(vocab_size=10), tell=print)
        assert found.known is not None and found.known.size == 10


def test_a_corpus_is_not_replaced_by_its_own_rows(tmp_path: Path) -> None:
    write_without_record(tmp_path / "corpus", [[1, 9]])
    with pytest.raises(UserError, match="is the corpus that is read, which would be replaced; give another"):
        padded(tmp_path / "corpus", tmp_path / "." / "corpus", overwrite=True)
    assert read_corpus(tmp_path / "corpus") == [[1, 9]]


def test_what_is_there_is_kept_for_the_same_corpus_and_replaced_only_when_told(tmp_path: Path) -> None:
    corpus, rows = tmp_path / "corpus", tmp_path / "rows"
    write_without_record(corpus, [[1, 9]])
    padded(corpus, rows)
    made = rows.with_suffix(".bin").stat().st_mtime_ns
    assert padded(corpus, rows, reuse=True) == [[1] + [9] * 7]
    assert rows.with_suffix(".bin").stat().st_mtime_ns == made
    write_without_record(corpus, [[2, 9]])
    for settings in ({}, {"reuse": True}):
        with pytest.raises(UserError, match=r"rows.bin exists; use --overwrite"):
            padded(corpus, rows, **settings)
    assert padded(corpus, rows, overwrite=True) == [[2] + [9] * 7]


@pytest.mark.parametrize(
    ("documents", "length", "message"),
    [
        ([[1, 9], [2, 8]], 8, "document 1 ends with id 8, and those before it with 9"),
        ([[9], [9]], 8, "has no document of two or more tokens"),
        ([[1, 9]], 1, "--seq-length 1: give 2 or more"),
    ],
)
def test_a_corpus_that_cannot_be_filled_up_is_refused_and_leaves_nothing(
    tmp_path: Path, documents: list[list[int]], length: int, message: str
) -> None:
    write_without_record(tmp_path / "corpus", documents)
    config = PadConfig(corpus=str(tmp_path / "corpus"), seq_length=length, output_prefix=str(tmp_path / "rows"))
    with pytest.raises(UserError, match=message):
        pad_corpus(config)
    assert not list(tmp_path.glob("*rows*"))


def test_a_corpus_that_is_not_there_or_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none: there is no .*none.bin"):
        padded(tmp_path / "none", tmp_path / "rows")
    write_without_record(tmp_path / "corpus", [[1, 2, 3, 9]])
    file = tmp_path / "corpus.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"corpus\.bin"):
        padded(tmp_path / "corpus", tmp_path / "rows")


def test_a_step_of_hot_switching_is_one_of_megatrons_own_loader_on_the_same_documents(tmp_path: Path) -> None:
    """Nothing of ours chooses, cuts or orders what stock Megatron reads: a step has the whole corpus."""
    draw = np.random.default_rng(7)
    documents = [[*draw.integers(0, END, length - 1).tolist(), END] for length in (5, 31, 12, 60, 9, 17, 32)]
    write_without_record(tmp_path / "corpus", documents)
    rows = [whole_rows(np.array(document), ROW) for document in documents]
    # One document, so that Megatron has no order of documents, and a row that counts nothing: it never reads the last.
    write_without_record(tmp_path / "rows", [np.concatenate([*rows, np.full(ROW, END)]).tolist()])
    count = sum(len(row) // ROW for row in rows)
    assert count == 8  # and as many pieces
    step: Options = {
        "mock_data": False,
        "split": "100,0,0",
        "global_batch_size": count,
        "train_iters": 1,
        "optimizer": "sgd",
        "lr": 0.5,
        "min_lr": 0.5,
        "clip_grad": 0.0,
    }
    hot = hot_run(["2,1,1", "1,2,1"], [ROW, 16, 0], data_path=str(tmp_path / "corpus"), **step)
    stock = run_pretrain(
        toy_gpt(COMMON, data_path=str(tmp_path / "rows"), eod_mask_loss=True, **step),
        2,
        patch="backend-only",
        probe=full_parameters,
    )
    assert_equal_except_for_rounding(hot, stock)
