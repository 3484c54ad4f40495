# SPDX-License-Identifier: Apache-2.0
"""Blends of corpora: how a command line names them, how their sequences take turns, and runs on them."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.blends import BlendedOrder
from megatron_ext.hot_switch.data.corpora import training_corpora
from megatron_ext.hot_switch.data.sequences import SequenceOrder
from tests.hot_switch.runs import hot_run, losses
from tests.support.corpus import unhurried
from tests.support.every_run import one_of_each
from tests.support.option_bundles import two_corpora

CORPORA = [np.array(lengths) for lengths in ([5] * 30, [40, 2, 1, 90], [17, 3, 200, 9, 9])]


def order(**changes):
    return BlendedOrder(CORPORA, [0.2, 30, 1.0], **{"longest": 16, "seed": 1, **changes})


def test_corpora_have_their_shares_of_the_tokens():
    blended = BlendedOrder(CORPORA, [20, 30, 50], longest=16, seed=1)
    bounds = np.cumsum([len(lengths) for lengths in CORPORA])
    for places in (20_000, 70_000):
        tokens = Counter()
        for place in range(places):
            sequence = blended.at(place)
            tokens[int(np.searchsorted(bounds, sequence.document, side="right"))] += sequence.positions
        shares = [100 * tokens[corpus] / tokens.total() for corpus in range(3)]
        assert shares == pytest.approx([20, 30, 50], abs=0.1)


def test_each_corpus_is_read_in_its_own_order_without_a_gap(monkeypatch):
    monkeypatch.setattr(BlendedOrder, "PERIOD", 50)
    blended = order()
    own, first = [SequenceOrder(lengths, longest=16, seed=1) for lengths in CORPORA], [0, 30, 34]
    read = [0, 0, 0]
    for place in range(700):
        found = blended.at(place)
        corpus = int(np.searchsorted([30, 34, 39], found.document, side="right"))
        expected = own[corpus].at(read[corpus])
        assert (found.document - first[corpus], found.offset, found.positions) == (
            expected.document,
            expected.offset,
            expected.positions,
        )
        read[corpus] += 1
    assert min(read) >= 14  # the smallest share, too, in every period


@given(place=st.integers(0, 300_000), count=st.integers(0, 9), peers=st.integers(1, 4), data=st.data())
@unhurried
def test_parts_together_read_the_whole_and_positions_are_those_of_sequences(place, count, peers, data):
    index = data.draw(st.integers(0, peers - 1))
    part, whole = order(part=(index, peers)), order()
    found = [part.at(each) for each in range(place, place + count)]
    assert found == [whole.at(each * peers + index) for each in range(place, place + count)]
    assert part.positions(place, count).tolist() == [sequence.positions for sequence in found]


def named(**given_names):
    names = ("data_path", "data_args_path", "train_data_path", "per_split_data_args_path", "split")
    return SimpleNamespace(**{name: given_names.get(name) for name in names})


def test_options_on_data_are_read_as_megatron_reads_them(tmp_path):
    words, listed = tmp_path / "words", tmp_path / "listed.json"
    words.write_text("30 one\n70  other\n")
    listed.write_text(json.dumps({"train": "one other", "valid": None, "test": None}))
    blend = training_corpora(named(data_args_path=str(words), split="90,5,5"))
    assert (blend.prefixes, blend.weights, blend.split) == (("one", "other"), (30.0, 70.0), "90,5,5")
    joined = training_corpora(named(per_split_data_args_path=str(listed)))
    assert (joined.prefixes, joined.weights, joined.split) == (("one", "other"), None, "1")
    assert training_corpora(named(data_path=["a", "b", "c"])).prefixes == ("a", "b", "c")
    assert training_corpora(named(data_path=["0.5", "a"])).weights == (0.5,)
    assert training_corpora(named(data_path=["a"])).split == "969,30,1"


@pytest.mark.parametrize(
    ("given_names", "said"),
    [
        ({}, "but there is none; give one of them"),
        ({"data_path": ["a"], "data_args_path": "b"}, "but there is --data-path, --data-args-path; give one"),
        ({"data_path": ["0.3", "a", "b", "c"]}, "--data-path 0.3 a b c: a weight is missing, or not above 0"),
        ({"data_path": ["1", "a", "0", "b"]}, "a weight is missing, or not above 0"),
        ({"data_path": ["nan", "a"]}, "a weight is missing, or not above 0"),
        ({"data_path": []}, "--data-path names no corpus"),
        ({"data_args_path": "/nowhere"}, "--data-args-path /nowhere: cannot be read"),
        ({"per_split_data_args_path": __file__}, "cannot be read (Expecting value"),
    ],
)
def test_data_that_are_not_named_rightly_are_an_error(given_names, said):
    with pytest.raises(UserError) as caught:
        training_corpora(named(**given_names))
    assert said in str(caught.value)


@pytest.fixture
def corpora(tmp_path):
    """The prefixes of two byte-level corpora."""
    return two_corpora(tmp_path)


@pytest.mark.parametrize(
    "way", one_of_each(["data_path", "data_args_path", "train_data_path", "per_split_data_args_path"], {0, 3})
)
def test_a_run_on_a_blend_does_not_depend_on_the_strategies(corpora, tmp_path, way):
    blend = ["0.3", corpora[0], "0.7", corpora[1]]
    (tmp_path / "words").write_text(" ".join(blend))
    (tmp_path / "listed.json").write_text(json.dumps({"train": blend, "valid": corpora[:1], "test": corpora[1:]}))
    data = {
        "data_path": {"data_path": blend, "split": "80,10,10"},
        "data_args_path": {"data_args_path": str(tmp_path / "words"), "split": "80,10,10"},
        "train_data_path": {"train_data_path": corpora, "valid_data_path": corpora[:1], "test_data_path": corpora[1:]},
        "per_split_data_args_path": {"per_split_data_args_path": str(tmp_path / "listed.json")},
    }[way]
    options = {
        "mock_data": None,
        "vocab_size": 263,
        "train_iters": 3,
        "eval_iters": 1,
        "eval_interval": 3,
        "data_cache_path": str(tmp_path / "cache"),
        **data,
    }
    hot = hot_run(["2,1,1", "1,2,1"], [32, 12, 0], **options)
    static = hot_run(["2,1,1"], [32, 0], **options)
    assert losses(hot) == pytest.approx(losses(static), abs=1e-5)
    assert len(set(losses(static))) == 3
    assert "validation loss at iteration 3" in hot[-1].stdout
