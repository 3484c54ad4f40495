# SPDX-License-Identifier: Apache-2.0
"""Plans of switches: nothing is lost, nothing moves in vain, nobody sends more than others without need."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.hot_switch import ALGORITHMS, SwitchPlan, plan_switch
from megatron_ext.params import GptShape, Layout, ParamsError, Placement, put
from tests.hot_switch.cases import chains
from tests.hot_switch.simulator import Shards, carry_out, shards_of
from tests.params.models import full_values

TINY = GptShape(
    num_layers=2,
    hidden_size=4,
    ffn_hidden_size=8,
    num_attention_heads=4,
    padded_vocab_size=8,
    gated_linear_unit=True,
    add_bias_linear=False,
    normalization="RMSNorm",
)
FC1, FC2 = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"

Case = tuple[GptShape, tuple[Layout, ...], int]
algorithms = st.sampled_from(sorted(ALGORITHMS))


def held_elements(shape: GptShape, layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Which elements of which tensors a rank holds, as masks of the global tensors."""
    masks = {}
    for placed in Placement(shape, layout).on_rank(rank):
        masks[placed.tensor.name] = torch.zeros(placed.tensor.shape, dtype=torch.bool)
        put(torch.ones(placed.slice.local_shape, dtype=torch.bool), placed.slice, masks[placed.tensor.name])
    return masks


def assert_equal(ours: Shards, expected: Shards) -> None:
    for rank, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        assert list(sorted(mine)) == list(sorted(theirs))
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype
            assert torch.equal(mine[name], value), (rank, name)


@settings(max_examples=40)
@given(chains(3), algorithms, st.sampled_from((torch.bfloat16, torch.float32)))
def test_a_chain_of_switches_back_to_home_is_bit_exact(case: Case, algorithm: str, dtype: torch.dtype) -> None:
    shape, layouts, gpus_per_node = replace(case[0], dtype=dtype), case[1], case[2]
    values = full_values(Placement(shape, layouts[0]).tensors)
    shards = shards_of(values, shape, layouts[0])
    for source, target in zip(layouts, (*layouts[1:], layouts[0]), strict=True):
        plan = plan_switch(shape, source, target, gpus_per_node=gpus_per_node, algorithm=algorithm)
        shards = carry_out(plan, shape, shards)
        assert_equal(shards, shards_of(values, shape, target))


@settings(max_examples=40)
@given(chains(), algorithms)
def test_a_rank_receives_exactly_the_bytes_that_it_lacks(case: Case, algorithm: str) -> None:
    shape, (source, target), gpus_per_node = case
    plan = plan_switch(shape, source, target, gpus_per_node=gpus_per_node, algorithm=algorithm)
    item_sizes = {tensor.name: tensor.dtype.itemsize for tensor in Placement(shape, source).tensors}
    for rank in range(plan.world_size):
        held = held_elements(shape, source, rank)
        lacking = 0
        for name, needed in held_elements(shape, target, rank).items():
            missing = needed & ~held[name] if name in held else needed
            lacking += int(missing.sum()) * item_sizes[name]
        assert sum(move.nbytes for moves in plan.receives(rank).values() for move in moves) == lacking


@settings(max_examples=40)
@given(chains(), algorithms)
def test_sender_and_receiver_see_the_same_moves_in_the_same_order(case: Case, algorithm: str) -> None:
    shape, (source, target), gpus_per_node = case
    plan = plan_switch(shape, source, target, gpus_per_node=gpus_per_node, algorithm=algorithm)
    sent = {(rank, peer): moves for rank in range(plan.world_size) for peer, moves in plan.sends(rank).items()}
    received = {(peer, rank): moves for rank in range(plan.world_size) for peer, moves in plan.receives(rank).items()}
    assert sent == received
    assert all(sender != receiver for sender, receiver in sent)


@settings(max_examples=40)
@given(chains(), st.data())
def test_tensors_that_are_left_out_neither_move_nor_stay(case: Case, data: st.DataObject) -> None:
    shape, (source, target), gpus_per_node = case
    names = [tensor.name for tensor in Placement(shape, source).tensors]
    without = data.draw(st.sets(st.sampled_from(names)))
    whole = plan_switch(shape, source, target, gpus_per_node=gpus_per_node)
    plan = plan_switch(shape, source, target, gpus_per_node=gpus_per_node, without=without)
    kept = [planned for planned in whole.tensors if planned.tensor.name not in without]
    assert [planned.tensor for planned in plan.tensors] == [planned.tensor for planned in kept]
    assert plan.bytes_moved == sum(len(planned.senders) * planned.slice_bytes for planned in kept)
    for rank in range(plan.world_size):
        entries = [*plan.stays(rank), *(move for moves in plan.sends(rank).values() for move in moves)]
        assert without.isdisjoint(entry.tensor.name for entry in entries)


def sent_bytes(plan: SwitchPlan) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes that each rank sends within its node, and to other nodes."""
    within: dict[int, int] = defaultdict(int)
    between: dict[int, int] = defaultdict(int)
    for rank in range(plan.world_size):
        for peer, moves in plan.sends(rank).items():
            is_near = rank // plan.gpus_per_node == peer // plan.gpus_per_node
            (within if is_near else between)[rank] += sum(move.nbytes for move in moves)
    return within, between


@settings(max_examples=60)
@given(chains())
def test_owners_of_the_same_parts_send_alike_within_nodes_and_between_them(case: Case) -> None:
    shape, (source, target), gpus_per_node = case
    plan = plan_switch(shape, source, target, gpus_per_node=gpus_per_node)
    largest = max(planned.slice_bytes for planned in plan.tensors)
    within, between = sent_bytes(plan)
    parts: dict[object, list[int]] = defaultdict(list)
    for rank in range(plan.world_size):
        place = source.coordinates(rank)
        parts[place.tp, place.pp, place.ep, place.etp].append(rank)
    for ranks in parts.values():
        between_nodes = [between[rank] for rank in ranks]
        assert max(between_nodes) - min(between_nodes) <= largest
        for node in {rank // gpus_per_node for rank in ranks}:
            in_node = [within[rank] for rank in ranks if rank // gpus_per_node == node]
            assert max(in_node) - min(in_node) <= largest


@settings(max_examples=40)
@given(chains())
def test_no_slice_crosses_nodes_whose_owner_is_on_the_receivers_node(case: Case) -> None:
    shape, (source, target), gpus_per_node = case
    plan = plan_switch(shape, source, target, gpus_per_node=gpus_per_node)
    held = [held_elements(shape, source, rank) for rank in range(plan.world_size)]
    for receiver in range(plan.world_size):
        node = receiver // gpus_per_node
        neighbours = range(node * gpus_per_node, (node + 1) * gpus_per_node)
        for sender, moves in plan.receives(receiver).items():
            if sender not in neighbours:
                for move in moves:
                    name = move.tensor.name
                    wanted = torch.zeros(move.tensor.shape, dtype=torch.bool)
                    needed = next(p for p in Placement(shape, target).on_rank(receiver) if p.tensor.name == name)
                    local = torch.zeros(needed.slice.local_shape, dtype=torch.bool)
                    for box in move.boxes:
                        local[tuple(slice(a, a + n) for a, n in zip(box.target_start, box.shape, strict=True))] = True
                    put(local, needed.slice, wanted)
                    assert not any(name in held[rank] and bool(held[rank][name][wanted].all()) for rank in neighbours)


def test_gate_and_up_rows_move_together_in_one_slice() -> None:
    plan = plan_switch(TINY, Layout(tp=2), Layout(dp=2))
    (move,) = [move for move in plan.receives(0)[1] if move.tensor.name == FC1]
    assert [(box.source_start, box.target_start, box.shape) for box in move.boxes] == [
        ((0, 0), (4, 0), (4, 4)),
        ((4, 0), (12, 0), (4, 4)),
    ]


def test_sizes_that_are_no_multiples_of_each_other_meet_in_their_least_common_multiple() -> None:
    shape = replace(TINY, num_attention_heads=12, hidden_size=12, ffn_hidden_size=12, padded_vocab_size=12)
    plan = plan_switch(shape, Layout(tp=6, dp=2), Layout(tp=4, dp=3), gpus_per_node=12)
    (planned,) = [planned for planned in plan.tensors if planned.tensor.name == QKV]
    assert planned.route.slices == 12
    assert [move.slice_index for move in plan.receives(5)[1] if move.tensor.name == QKV] == [3]


def test_a_part_that_lies_in_one_piece_needs_no_copy() -> None:
    plan = plan_switch(TINY, Layout(dp=4), Layout(tp=4))
    offsets = {stay.tensor.name: stay.alias_offset for stay in plan.stays(3)}
    assert offsets[QKV] == 9 * 4  # rows 9 to 11 of 12
    assert offsets[FC1] is None  # gate and up rows are apart
    assert offsets[FC2] is None  # columns
    assert offsets["decoder.final_layernorm.weight"] == 0


def test_a_switch_that_only_regroups_whole_tensors_copies_nothing() -> None:
    plan = plan_switch(TINY, Layout(dp=4), Layout(dp=2, pp=2))
    for rank in range(4):
        assert not plan.receives(rank)
        assert [stay.alias_offset for stay in plan.stays(rank)] == [0] * len(plan.stays(rank))


def test_a_tied_embedding_is_sent_under_the_name_that_each_side_knows() -> None:
    tied = replace(TINY, share_embeddings_and_output_weights=True)
    plan = plan_switch(tied, Layout(pp=2, dp=2), Layout(tp=2, pp=2), gpus_per_node=4)
    assert {stay.target_name for stay in plan.stays(3) if stay.tensor.shared_with} == {"output_layer.weight"}
    back = plan_switch(tied, Layout(tp=2, pp=2), Layout(dp=4), gpus_per_node=4)
    names = {
        (sender, move.source_name, move.target_name)
        for sender, moves in back.receives(2).items()
        for move in moves
        if move.tensor.shared_with
    }
    ((sender, source_name, target_name),) = names
    assert target_name == "embedding.word_embeddings.weight"
    assert source_name == ("output_layer.weight" if sender >= 2 else target_name)


@pytest.mark.parametrize(
    ("source", "target", "options", "complaint"),
    [
        (Layout(dp=2), Layout(dp=4), {}, "the layouts have 2 and 4"),
        (Layout(dp=6), Layout(dp=6), {"gpus_per_node": 4}, "6 ranks do not fill nodes of 4 GPUs"),
        (Layout(dp=2), Layout(dp=2), {"gpus_per_node": 0}, "2 ranks do not fill nodes of 0 GPUs"),
        (Layout(dp=2), Layout(dp=2), {"algorithm": "best"}, "use one of balanced, joint, greedy, round-robin, fcfs"),
    ],
)
def test_a_switch_that_cannot_be_is_refused(
    source: Layout, target: Layout, options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        plan_switch(TINY, source, target, **options)


def test_parts_that_would_not_be_equal_are_refused_with_the_tensor_named() -> None:
    with pytest.raises(ParamsError, match=r"word_embeddings\.weight: axis 0 has a block of 8 elements"):
        plan_switch(TINY, Layout(dp=3), Layout(tp=3))
