# SPDX-License-Identifier: Apache-2.0
"""Perplexity is that of every token of the part, each predicted once."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.evaluation.perplexity import measure_perplexity
from megatron_ext.evaluation.perplexity_config import PerplexityConfig
from tests.convert import models

LENGTHS = (5, 40, 1, 33, 7, 60, 12, 25)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """Return the prefix of a corpus, and its documents."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(3)
    documents = [generator.integers(0, models.ROWS, size=length).tolist() for length in LENGTHS]
    prefix = str(tmp_path_factory.mktemp("corpus") / "corpus")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(prefix + ".idx")
    return prefix, documents


def loss_of(tokens: list[int], length: int) -> tuple[float, int]:
    """Return the sum of what each token but the first costs, computed sequence by sequence in fp64."""
    model = models.make("llama").double()
    total = 0.0
    for begin in range(0, len(tokens) - 1, length):
        row = torch.tensor(tokens[begin : begin + length + 1])
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0]
        total -= float(logits.log_softmax(-1).gather(1, row[1:, None]).sum())
    return total, len(tokens) - 1


@pytest.mark.parametrize(
    ("split", "part", "documents"),
    [
        ("1,0,0", "training", range(8)),
        ("50,25,25", "validation", range(4, 6)),
        ("50,25,25", "test", range(6, 8)),
    ],
)
@pytest.mark.parametrize(("length", "batch"), [(16, 3), (1000, 8), (1, 64)])
def test_every_token_of_the_part_is_predicted_once(
    split: str, part: Any, documents: range, length: int, batch: int, corpus: tuple[str, list[list[int]]]
):
    prefix, all_documents = corpus
    tokens = [token for number in documents for token in all_documents[number]]
    total, count = loss_of(tokens, length)
    config = PerplexityConfig(split=split, part=part, sequence_length=length, batch_size=batch)
    found = measure_perplexity(models.make("llama"), prefix, config)
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_it_stops_at_the_number_of_tokens_that_is_asked_for(corpus: tuple[str, list[list[int]]]):
    prefix, documents = corpus
    config = PerplexityConfig(split="1,0,0", part="training", sequence_length=16, max_tokens=41)
    total, _ = loss_of([token for document in documents for token in document][:42], 16)
    found = measure_perplexity(models.make("llama"), prefix, config)
    assert (found["tokens"], found["loss"]) == (41, pytest.approx(total / 41, rel=1e-6))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "1,0,0"}, "leaves no document of .* for validation"),
        ({"split": "no"}, "--split is 'no'"),
        ({"sequence_length": 0}, "--sequence-length 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"max_tokens": -1}, "--max-tokens -1"),
    ],
)
def test_bad_settings_are_named(options: Any, said: str, corpus: tuple[str, list[list[int]]]):
    with pytest.raises(UserError, match=said):
        measure_perplexity(models.make("llama"), corpus[0], PerplexityConfig(**options))


def test_a_corpus_of_another_tokenizer_is_refused(corpus: tuple[str, list[list[int]]]):
    small = models.make("llama")
    small.config.vocab_size = 100
    with pytest.raises(UserError, match=r"the model.s vocabulary 100 rows: .* another tokenizer"):
        measure_perplexity(small, corpus[0], PerplexityConfig(split="1,1,0"))


def test_a_non_finite_loss_is_refused(corpus: tuple[str, list[list[int]]]):
    damaged = models.make("llama")
    with torch.no_grad():
        damaged.lm_head.weight[0] = math.nan
    with pytest.raises(UserError, match=r"the model.s loss is nan after 0 tokens: .* --dtype fp32"):
        measure_perplexity(damaged, corpus[0], PerplexityConfig(split="1,1,0"))


def test_a_corpus_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"there is no .*nothing\.bin; give the prefix"):
        measure_perplexity(models.make("llama"), str(tmp_path / "nothing"), PerplexityConfig())
