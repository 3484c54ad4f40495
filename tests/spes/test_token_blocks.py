# SPDX-License-Identifier: Apache-2.0
"""Blocks of tokens are put into two groups of experts, and back."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.spes.token_blocks import TokenBlocks

EXPERTS = st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=8)


@given(EXPERTS)
def test_tokens_of_trained_experts_are_neighbours_and_come_back_where_they_were(experts: list[tuple[bool, int]]):
    trained, counts = ([each[index] for each in experts] for index in (0, 1))
    blocks = TokenBlocks.of(trained)
    owner = torch.repeat_interleave(torch.arange(len(experts)), torch.tensor(counts))
    tokens = torch.stack((owner, torch.arange(len(owner))), dim=1)
    arranged = blocks.arrange(tokens, counts)
    assert arranged[:, 0].tolist() == [expert for expert in blocks.order for _ in range(counts[expert])]
    kinds = [trained[expert] for expert in blocks.order]
    assert sum(left != right for left, right in pairwise(kinds)) == len(set(trained)) - 1
    assert [{trained[expert] for expert in group} for group in blocks.groups] == [
        {kind} for kind in dict.fromkeys(kinds)
    ]
    assert torch.equal(blocks.restore(arranged, counts), tokens)


def test_nothing_is_moved_where_the_first_or_the_last_experts_are_trained():
    for trained in ([True, True, False], [False, True, True], [True], [False, False]):
        assert TokenBlocks.of(trained).is_as_it_was
    assert not TokenBlocks.of([True, False, True]).is_as_it_was
