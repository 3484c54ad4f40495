# SPDX-License-Identifier: Apache-2.0
"""Parts of the training samples."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.seams.samples import PartOfSamples


class Numbers:
    """Samples that are their own indices."""

    split = None

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.length
        return index


@given(length=st.integers(0, 50), count=st.integers(1, 7))
def test_parts_of_equal_length_hold_every_sample_once(length: int, count: int):
    parts = [PartOfSamples(Numbers(length), index, count) for index in range(count)]
    seen = [part[number] for part in parts for number in range(len(part))]
    assert sorted(seen) == list(range(length // count * count))
    assert len({len(part) for part in parts}) == 1
