# SPDX-License-Identifier: Apache-2.0
"""Documents of .bin/.idx files: those of the training part, token by token, and a run on them."""

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.hot_switch.data.training_documents import MockDocuments
from tests.hot_switch.runs import arguments, hot_run, losses
from tests.support.corpus import make, write_json_lines
from tests.support.distributed import run_ranks
from tests.support.pretrain import run_failing_pretrain

TEXTS = [f"{number} " * (1 + number % 23) for number in range(50)]


@pytest.fixture
def corpus(tmp_path):
    """The prefix of a byte-level corpus of TEXTS, in their order."""
    prefix = tmp_path / "corpus"
    make(write_json_lines(tmp_path / "texts.jsonl", TEXTS), prefix)
    return str(prefix)


def documents_read(prefixes, split):
    """All documents of the training parts, each read in two pieces."""
    from megatron_ext.hot_switch.data.training_documents import IndexedDocuments, JoinedDocuments

    documents = JoinedDocuments([IndexedDocuments(prefix, split) for prefix in prefixes], None)
    return [
        [*documents.read(number, 0, 1), *documents.read(number, 1, int(length) - 1)]
        for number, length in enumerate(documents.lengths)
    ]


def test_the_training_part_is_read_token_by_token(corpus):
    (found,) = run_ranks(documents_read, 1, [corpus, corpus], "80,10,10")
    assert [bytes(int(token) for token in tokens[:-1]).decode() for tokens in found] == 2 * TEXTS[:40]
    assert all(tokens[-1] == 256 for tokens in found)


def test_a_split_without_training_data_is_an_error(corpus):
    (exit_,) = run_ranks(documents_read, 1, [corpus], "0,90,10", expect_failure=True)
    assert "has no document for training" in exit_.traceback


@pytest.mark.parametrize(
    ("name", "kept", "said"),
    [
        (".bin", 100, ".bin: has 100 bytes, and its index speaks of "),
        (".bin", None, ".bin; give the prefix of a .bin/.idx corpus"),
        (".idx", 200, ".idx: has 200 bytes of "),
        (".idx", 5, ".idx: is not an index of a Megatron corpus"),
        (".idx", None, ".idx; give the prefix of a .bin/.idx corpus"),
    ],
)
def test_files_that_are_not_whole_are_refused(corpus, name, kept, said):
    file = Path(corpus + name)
    content = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(content[:kept])
    options = {"mock_data": None, "data_path": [corpus], "split": "100,0,0", "vocab_size": 263}
    exit_ = run_failing_pretrain(arguments(["1,1,1"], [32, 0], **options), 1)[0]
    assert said in exit_.stderr and "Traceback" not in exit_.stderr


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (None, "--split 969,30,1: of the 50 documents of .* none is for test, .* --split 49,1,0"),
        ("999,0.5,0.5", "none is for validation and test"),
        ("most,some", "--split is 'most,some'; give up to three numbers that are not all 0"),
    ],
)
def test_a_split_from_which_megatron_would_not_return_is_refused(corpus, split, said):
    options = {"mock_data": None, "data_path": [corpus], "split": split, "vocab_size": 263}
    exit_ = run_failing_pretrain(arguments(["1,1,1"], [32, 0], **options), 1)[0]
    assert re.search(said, exit_.stderr) and "Traceback" not in exit_.stderr


def test_tokens_that_the_vocabulary_does_not_have_end_the_run(corpus):
    options = {"mock_data": None, "data_path": [corpus], "split": "100,0,0", "train_iters": 2, "vocab_size": 255}
    exits = run_failing_pretrain(arguments(["1,2,1"], [32, 0], **options), 2)
    said = exits[0].stderr + exits[1].stderr
    assert "has the token 256, and the vocabulary has the rows 0 to 255; give the tokenizer or --vocab-size" in said
    assert "Traceback" not in said


def test_a_run_on_files_does_not_depend_on_the_strategies(corpus):
    options = {
        "mock_data": None,
        "data_path": [corpus],
        "split": "80,10,10",
        "vocab_size": 263,
        "train_iters": 3,
        "data_cache_path": f"{corpus}.cache",
    }
    hot = hot_run(["2,1,1", "1,2,1"], [32, 12, 0], **options)
    static = hot_run(["2,1,1"], [32, 0], **options)
    assert losses(hot) == pytest.approx(losses(static), abs=1e-5)
    assert len(set(losses(static))) == 3


def test_mock_documents_are_short_and_long_and_the_same_again():
    documents, again = (MockDocuments(longest=32, vocab_size=127, seed=3) for _ in range(2))
    lengths = documents.lengths
    assert lengths.min() == 1 and lengths.max() == 64
    assert (lengths <= 16).mean() > 0.7
    number = int(np.argmax(lengths))
    whole = documents.read(number, 0, 64)
    assert whole.min() >= 0 and whole.max() < 127
    assert again.read(number, 10, 5).tolist() == whole[10:15].tolist()
