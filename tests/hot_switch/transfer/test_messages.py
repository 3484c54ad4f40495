# SPDX-License-Identifier: Apache-2.0
"""Messages of a switch: every element once, sizes kept, for any sizes and on any layouts."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.hot_switch import plan_switch
from megatron_ext.hot_switch.transfer.messages import MessageSizes, messages_between
from megatron_ext.hot_switch.transfer.windows import join_boxes, window_of
from megatron_ext.params import Overlap, Placement
from tests.hot_switch.cases import chains
from tests.hot_switch.simulator import shards_of
from tests.params.models import full_values

sizes_of_messages = st.builds(
    MessageSizes, direct_bytes=st.sampled_from((0, 1, 64, 500, 1 << 30)), chunk_bytes=st.sampled_from((8, 100, 1 << 20))
)


@settings(max_examples=40)
@given(chains(), sizes_of_messages, st.booleans(), st.sampled_from((torch.bfloat16, torch.float32)))
def test_messages_of_any_size_bring_every_element_once(case, sizes, gradients, dtype):
    shape, (source, target), gpus_per_node = replace(case[0], dtype=dtype), case[1], case[2]
    plan = plan_switch(shape, source, target, gpus_per_node=gpus_per_node)
    values = full_values(Placement(shape, source).tensors)
    before, after = shards_of(values, shape, source), shards_of(values, shape, target)
    for rank in range(plan.world_size):
        for peer, moves in plan.sends(rank).items():
            moved = [move for move in moves if not (gradients and move.tensor.kind == "buffer")]
            messages = messages_between(moves, sizes, gradients=gradients)
            lacking = {move.target_name: after[peer][move.target_name].clone() for move in moves}
            carried = 0
            for part in (part for message in messages for part in message.parts):
                arrived, wanted = part.source.view(before[rank][part.source_name]), lacking[part.target_name]
                assert torch.equal(arrived, part.target.view(wanted))
                part.target.view(wanted).fill_(torch.nan)  # what comes twice does not equal any more
                carried += arrived.numel()
            assert carried == sum(math.prod(box.shape) for move in moved for box in move.boxes)
            if not gradients:
                assert sum(message.nbytes for message in messages) == sum(move.nbytes for move in moves)
            require_sizes(messages, sizes, gradients)


def require_sizes(messages, sizes, gradients):
    """What is copied on the way is bounded round by round, and what is large is not packed."""
    copied = defaultdict(int)
    assert [message.round for message in messages] == sorted(message.round for message in messages)
    for message in messages:
        if gradients or not (message.leaves_directly and message.lands_directly):
            copied[message.round] += message.nbytes
        for part in message.parts:
            if len(message.parts) > 1 and part.source.numel * message.dtype.itemsize >= sizes.direct_bytes:
                # A run that was too large for the chunk would have been cut and sent alone.
                assert not part.source.is_run and not part.target.is_run
    assert all(nbytes <= sizes.chunk_bytes for nbytes in copied.values())


def test_boxes_that_follow_each_other_at_both_ends_travel_as_one():
    first, second, gap = (
        Overlap((0, 0), (2, 0), (2, 3)),
        Overlap((2, 0), (4, 0), (5, 3)),
        Overlap((8, 0), (9, 0), (1, 3)),
    )
    assert join_boxes([first, second, gap]) == [Overlap((0, 0), (2, 0), (7, 3)), gap]
    assert join_boxes([first, Overlap((2, 0), (5, 0), (2, 3))]) != [Overlap((0, 0), (2, 0), (4, 3))]
    assert join_boxes([first, Overlap((2, 0), (4, 0), (2, 2))]) == [first, Overlap((2, 0), (4, 0), (2, 2))]
    gate_and_up = [Overlap((0, 0), (0, 0), (2, 3)), Overlap((6, 0), (8, 0), (2, 3))]
    assert join_boxes([*gate_and_up, Overlap((2, 0), (2, 0), (2, 3)), Overlap((8, 0), (10, 0), (2, 3))]) == [
        Overlap((0, 0), (0, 0), (4, 3)),
        Overlap((6, 0), (8, 0), (4, 3)),
    ]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3))
def test_a_window_is_the_box_of_the_tensor_and_knows_whether_it_has_gaps(axes):
    start = tuple(min(first, size - 1) for size, first, _ in axes)
    shape = tuple(size for size, _, _ in axes)
    box = tuple(min(wanted, size - first) for (size, _, wanted), first in zip(axes, start, strict=True))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    window = window_of(shape, start, box)
    expected = tensor[tuple(slice(first, first + size) for first, size in zip(start, box, strict=True))]
    assert torch.equal(window.view(tensor), expected)
    assert window.is_run == expected.is_contiguous()
    assert window.numel == expected.numel()


@pytest.mark.parametrize(("sizes", "named"), [((-1, 8), "direct_bytes"), ((0, 7), "chunk_bytes")])
def test_sizes_that_no_message_can_have_are_refused(sizes, named):
    with pytest.raises(UserError, match=named):
        MessageSizes(direct_bytes=sizes[0], chunk_bytes=sizes[1])
