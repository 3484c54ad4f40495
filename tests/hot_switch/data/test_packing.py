# SPDX-License-Identifier: Apache-2.0
"""Global batches are split, packed and dealt out without losing a token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.hot_switch import Bucket, Strategy, StrategyList
from megatron_ext.hot_switch.data.packing import first_fit_decreasing, plan_batch, split_by_length

BUCKETS = (Bucket(above=16, up_to=32), Bucket(above=0, up_to=8), Bucket(above=8, up_to=16))
LISTED = StrategyList(
    strategies=(
        Strategy(dp=1, tp=2, pp=2, sequence_parallel=True),
        Strategy(dp=4, tp=1, pp=1, micro_batch_size=2),
        Strategy(dp=2, tp=1, pp=2, vpp=2),
    ),
    buckets=BUCKETS,
)
lengths_of_a_batch = st.lists(st.integers(1, 32), max_size=40)


@given(lengths=lengths_of_a_batch)
def test_every_sequence_is_in_the_bucket_of_its_length_and_only_there(lengths):
    parts = split_by_length(lengths, BUCKETS)
    assert sorted(sequence for part in parts for sequence in part) == list(range(len(lengths)))
    for part, bucket in zip(parts, BUCKETS, strict=True):
        assert all(bucket.above < lengths[sequence] <= bucket.up_to for sequence in part)


@pytest.mark.parametrize("length", [0, 33])
def test_a_length_outside_all_buckets_is_an_error(length):
    with pytest.raises(ValueError, match=f"{length} positions"):
        split_by_length([length], BUCKETS)


@given(lengths=lengths_of_a_batch)
def test_bins_are_not_overfull_and_no_bin_could_be_emptied_into_one_before_it(lengths):
    bins = first_fit_decreasing(lengths, 32)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    filled = [sum(lengths[item] for item in items) for items in bins]
    assert all(size <= 32 for size in filled)
    for later in range(len(bins)):
        assert all(filled[earlier] + lengths[bins[later][0]] > 32 for earlier in range(later))


def test_the_longest_goes_first_and_into_the_first_bin_with_room():
    assert first_fit_decreasing([4, 9, 6, 6, 5], 10) == [[1], [2, 0], [3], [4]]


@given(lengths=lengths_of_a_batch)
def test_every_sequence_is_in_exactly_one_row_and_replicas_make_the_same_steps(lengths):
    parts = plan_batch(lengths, LISTED)
    seen = []
    for strategy, bucket, part in zip(LISTED.strategies, BUCKETS, parts, strict=True):
        if part is None:
            continue
        assert len(part.micro_batches) == strategy.dp
        assert part.row_length <= bucket.up_to
        assert part.row_length % (strategy.tp if strategy.sequence_parallel else 1) == 0
        for replica in part.micro_batches:
            assert len(replica) == part.count >= 1
            assert strategy.vpp == 1 or part.count % strategy.pp == 0
            for rows in replica:
                assert len(rows) == strategy.micro_batch_size
                for row in rows:
                    assert sum(lengths[sequence] for sequence in row) <= part.row_length
                    seen += row
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths=lengths_of_a_batch)
def test_rows_that_are_not_packed_have_a_sequence_each(lengths):
    seen = []
    for part in plan_batch(lengths, LISTED, packs=False):
        if part is None:
            continue
        for row in (row for replica in part.micro_batches for rows in replica for row in rows):
            assert len(row) <= 1
            assert all(lengths[sequence] <= part.row_length for sequence in row)
            seen += row
    assert sorted(seen) == list(range(len(lengths)))


def test_a_guest_without_data_has_no_turn_and_home_without_data_a_row_of_zero_weight():
    home, short, middle = plan_batch([3, 8], LISTED)
    assert middle is None
    assert home.micro_batches == ((((),),),)
    assert home.row_length == 2  # sequence parallel over two ranks
    # Two sequences of 11 positions do not fit a row of 8; four replicas have two rows each.
    assert short.micro_batches == ((((1,), ()),), (((0,), ()),), (((), ()),), (((), ()),))
    assert (short.row_length, short.positions) == (8, 64)


def test_lengths_on_a_bound_belong_to_the_bucket_below_it():
    assert split_by_length([8, 9, 16, 17, 32, 1], BUCKETS) == [[3, 4], [0, 5], [1, 2]]
