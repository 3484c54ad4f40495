# SPDX-License-Identifier: Apache-2.0
"""--split is shared out as Megatron does it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.split import MEGATRONS_SPLIT, advised_split, parts_of, parts_without_documents
from megatron_ext.errors import UserError

NUMBERS = st.one_of(st.integers(0, 1000).map(str), st.floats(0, 1, allow_subnormal=False).map(lambda x: f"{x:.6f}"))


@given(st.integers(0, 10**9), st.lists(NUMBERS, min_size=1, max_size=3), st.sampled_from([",", ", ", " / "]))
def test_every_part_begins_and_ends_where_megatrons_does(count: int, numbers: list[str], between: str) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    split = between.join(numbers)
    if not any(map(float, numbers)):
        with pytest.raises(UserError, match="give up to three numbers that are not all 0"):
            parts_of(count, split)
        return
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    expected = [None if part is None else (round(part[0] * count), round(part[1] * count)) for part in matrix]
    assert parts_of(count, split) == expected


@pytest.mark.parametrize("split", ["", "most,some", "1,1,1,1", "0", "1.2.3", "9" * 400])
def test_what_is_not_a_split_is_refused(split: str) -> None:
    with pytest.raises(UserError, match="give up to three numbers"):
        parts_of(100, split)


@pytest.mark.parametrize("count", [1, 2, 50, 400])
def test_the_advised_split_leaves_no_part_empty_where_megatrons_own_does(count: int) -> None:
    assert parts_without_documents(count, MEGATRONS_SPLIT)
    assert not parts_without_documents(count, advised_split(count))
