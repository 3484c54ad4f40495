# SPDX-License-Identifier: Apache-2.0
"""Invariant 7: every tensor is synchronised exactly once for any sizes and any bucket size."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.local_sgd.engine import partition

SIZES = st.lists(st.integers(min_value=0, max_value=50), max_size=60)


@given(SIZES, st.integers(min_value=1, max_value=60))
def test_every_index_occurs_exactly_once_and_in_order(sizes, limit):
    assert [index for run in partition(sizes, limit) for index in run] == list(range(len(sizes)))


@given(SIZES, st.integers(min_value=1, max_value=60))
def test_a_run_exceeds_the_limit_only_when_it_is_one_large_entry(sizes, limit):
    for run in partition(sizes, limit):
        assert sum(sizes[index] for index in run) <= limit or len(run) == 1


@given(SIZES, st.integers(min_value=1, max_value=60))
def test_no_run_is_empty(sizes, limit):
    assert all(partition(sizes, limit))


def test_the_case_that_loses_tensors_elsewhere():
    # Sizes 3 and 3 under a limit of 4: an offset that advances by the limit instead of the size drops the second.
    assert partition([3, 3], 4) == [[0], [1]]
    assert partition([9], 4) == [[0]]
