# SPDX-License-Identifier: Apache-2.0
"""The endless order of sequences: every token once per epoch, and the same place again after a resume."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.sequences import Sequence, SequenceOrder


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=12).filter(lambda found: max(found) > 1),
    longest=st.integers(1, 9),
    seed=st.integers(0, 3),
)
def test_an_epoch_predicts_every_token_but_the_first_of_each_document_once(lengths, longest, seed):
    order = SequenceOrder(np.array(lengths), longest=longest, seed=seed)
    for epoch in range(2):
        predicted = Counter()
        for place in range(epoch * order.per_epoch, (epoch + 1) * order.per_epoch):
            sequence = order.at(place)
            assert 1 <= sequence.positions <= longest
            predicted.update((sequence.document, sequence.offset + 1 + step) for step in range(sequence.positions))
        assert predicted == Counter(
            (document, token) for document, length in enumerate(lengths) for token in range(1, length)
        )


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=12).filter(lambda found: max(found) > 1),
    longest=st.integers(1, 9),
    place=st.integers(0, 40),
    count=st.integers(0, 30),
)
def test_positions_are_those_of_the_sequences_one_by_one(lengths, longest, place, count):
    order = SequenceOrder(np.array(lengths), longest=longest, seed=1)
    one_by_one = [order.at(each).positions for each in range(place, place + count)]
    assert order.positions(place, count).tolist() == one_by_one


@given(
    lengths=st.lists(st.integers(2, 25), min_size=1, max_size=12),
    peers=st.integers(1, 5),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_parts_are_disjoint_and_together_the_whole_wherever_a_job_resumes(lengths, peers, seed, data):
    whole = SequenceOrder(np.array(lengths), longest=4, seed=seed)
    rounds = 3 * whole.per_epoch
    found = [None] * (rounds * peers)
    for index in range(peers):
        # Steps of its own size, and a new process at some of them.
        consumed = 0
        while consumed < rounds:
            order = SequenceOrder(np.array(lengths), longest=4, seed=seed, part=(index, peers))
            until = min(rounds, consumed + data.draw(st.integers(1, rounds)))
            for place in range(consumed, until):
                assert found[place * peers + index] is None
                found[place * peers + index] = order.at(place)
            consumed = until
    assert found == [whole.at(place) for place in range(rounds * peers)]
    for epoch in range(3 * peers):
        of_epoch = found[epoch * whole.per_epoch : (epoch + 1) * whole.per_epoch]
        assert len(set(of_epoch)) == whole.per_epoch


def test_the_order_depends_on_the_seed_and_the_epoch_and_not_on_what_was_read_before():
    lengths = np.arange(2, 60)
    order, again, other = (SequenceOrder(lengths, longest=16, seed=seed) for seed in (1, 1, 2))
    count = order.per_epoch
    epochs = [[order.at(place) for place in range(first, first + count)] for first in (0, count)]
    assert [again.at(place) for place in range(count, 2 * count)] == epochs[1]
    assert again.at(5) == epochs[0][5]
    assert epochs[0] != epochs[1]
    assert [other.at(place) for place in range(count)] != epochs[0]


def test_a_document_longer_than_a_row_becomes_pieces_that_continue_where_the_last_one_ended():
    order = SequenceOrder(np.array([1, 10]), longest=4, seed=0)
    pieces = sorted((order.at(place) for place in range(order.per_epoch)), key=lambda piece: piece.offset)
    assert pieces == [Sequence(1, 0, 4), Sequence(1, 4, 4), Sequence(1, 8, 1)]


@pytest.mark.parametrize("lengths", [[], [0, 1, 1]])
def test_data_with_nothing_to_predict_is_an_error(lengths):
    with pytest.raises(UserError, match="no document of two or more tokens"):
        SequenceOrder(np.array(lengths), longest=4, seed=0)
