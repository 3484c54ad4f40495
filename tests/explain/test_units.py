# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them."""

from megatron_ext.explain.units import count, gigabytes, ranges


def test_ranks_in_a_row_are_written_as_one_range():
    assert ranges([0, 1, 2, 3, 8, 9, 10, 11]) == "0-3, 8-11"
    assert ranges([5]) == "5"
    assert ranges([4, 0, 2]) == "0, 2, 4"


def test_bytes_are_in_the_largest_unit_of_which_there_is_one():
    assert [gigabytes(number) for number in (0, 999, 1000, 2.5e6, 3e9, 4.2e12)] == [
        *("0 bytes", "999 bytes", "1.00 kB", "2.50 MB", "3.00 GB", "4.20 TB")
    ]


def test_elements_are_told_exactly_and_in_words():
    assert count(6_738_415_616) == "6,738,415,616 (6.74 billion)"
    assert count(512) == "512"
