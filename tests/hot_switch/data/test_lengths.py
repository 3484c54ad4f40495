# SPDX-License-Identifier: Apache-2.0
"""Lengths of a corpus, and batches that look like it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.lengths import read_lengths, typical_batch
from tests.support.corpus import make, read_corpus


def test_the_index_of_a_corpus_tells_the_tokens_of_its_documents(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(5):
        (tmp_path / "text" / f"{number}.txt").write_text("word " * (number + 1))
    make(tmp_path / "text", tmp_path / "corpus")
    expected = [len(document) for document in read_corpus(tmp_path / "corpus")]
    assert read_lengths(tmp_path / "corpus").tolist() == expected
    assert read_lengths(tmp_path / "corpus.idx").tolist() == expected


def test_a_text_file_has_a_length_per_line(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("12\n\n7\n")
    assert read_lengths(tmp_path / "lengths").tolist() == [12, 7]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("lengths", b"12\nseven\n", r"line 2: 'seven' is not a number"),
        ("lengths", b"99999999999999999999999\n", r"line 1: '99999999999999999999999' is not a number"),
        ("lengths", "\u0661\u0662\n".encode(), "line 1: .* is not a number"),
        ("corpus.idx", b"nothing of the kind, but long enough", "is not an index of a Megatron corpus"),
        (
            "corpus.idx",
            b"MMIDIDX\x00\x00" + bytes(8) + b"\x01" + (9).to_bytes(8, "little") + bytes(12),
            "has 38 bytes of 142; it is incomplete",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_lengths(tmp_path / name)


@pytest.mark.parametrize("path", ["/no/such/file", ".", "..", "/", ""])
def test_what_is_not_a_file_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=r"--lengths .*: cannot be read .*; give the prefix"):
        read_lengths(Path(path))


def test_a_batch_of_endless_documents_takes_no_memory_for_them() -> None:
    found = typical_batch(np.array([10**10 - 1, 101]), sequences=4, context=64)
    assert found == [64] * 4


@given(st.lists(st.integers(2, 500), min_size=1, max_size=30), st.integers(1, 40), st.integers(1, 100))
def test_a_batch_has_the_quantiles_of_the_corpus(documents: list[int], sequences: int, context: int) -> None:
    found = typical_batch(np.array(documents), sequences=sequences, context=context)
    pieces = sorted(
        piece
        for tokens in documents
        for piece in [context] * ((tokens - 1) // context) + [(tokens - 1) % context]
        if piece
    )
    assert len(found) == sequences
    assert list(found) == sorted(found)
    assert set(found) <= set(pieces)
    if sequences == len(pieces):
        assert list(found) == pieces


def test_documents_without_a_token_to_predict_are_refused() -> None:
    with pytest.raises(UserError, match="no document has two or more tokens"):
        typical_batch(np.array([1, 0, 1]), sequences=4, context=8)
