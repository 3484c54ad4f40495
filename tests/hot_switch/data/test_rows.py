# SPDX-License-Identifier: Apache-2.0
"""Packed rows: tokens, labels, positions and the mask between documents."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.hot_switch.data.rows import Excerpt, document_mask, pack_rows


def test_sequences_lie_one_behind_the_other_each_from_position_zero():
    batch = pack_rows([[Excerpt(np.array([5, 6, 7])), Excerpt(np.array([8, 9]))], []], 5)
    assert batch.tokens.tolist() == [[5, 6, 8, 0, 0], [0] * 5]
    assert batch.labels.tolist() == [[6, 7, 9, 0, 0], [0] * 5]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 0, 0], [0] * 5]
    assert batch.position_ids.tolist() == [[0, 1, 0, 0, 0], [0] * 5]
    assert batch.segments.tolist() == [[0, 0, 1, -1, -1], [-1] * 5]
    assert [batch.tokens.dtype, batch.loss_mask.dtype] == [torch.int64, torch.float32]


@given(sizes=st.lists(st.integers(1, 5), max_size=5), padding=st.integers(0, 3))
def test_a_position_sees_itself_and_what_precedes_it_in_its_sequence(sizes, padding):
    batch = pack_rows([[Excerpt(np.arange(size + 1)) for size in sizes]], max(1, sum(sizes) + padding))
    mask = document_mask(batch.segments)
    segments = batch.segments[0].tolist()
    assert mask.shape == (1, 1, len(segments), len(segments))
    for query, own in enumerate(segments):
        for key, other in enumerate(segments):
            assert bool(mask[0, 0, query, key]) == (other != own or key > query)


def test_attention_in_a_packed_row_is_that_of_each_document_alone():
    torch.manual_seed(0)
    sizes, width = [4, 1, 6], 8
    batch = pack_rows([[Excerpt(np.arange(size + 1)) for size in sizes]], 13)
    query, key, value = (torch.randn(13, width, dtype=torch.float64) for _ in range(3))

    def attend(query, key, value, forbidden):
        scores = (query @ key.T / width**0.5).masked_fill(forbidden, -10000.0)
        return scores.softmax(-1) @ value

    together = attend(query, key, value, document_mask(batch.segments)[0, 0])
    first = 0
    for size in sizes:
        part = slice(first, first + size)
        alone = attend(query[part], key[part], value[part], torch.ones(size, size, dtype=torch.bool).triu(1))
        torch.testing.assert_close(together[part], alone, rtol=0, atol=1e-12)
        first += size
