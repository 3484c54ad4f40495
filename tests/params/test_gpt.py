# SPDX-License-Identifier: Apache-2.0

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.params import (
    GptShape,
    Layout,
    ParamsError,
    Placement,
    gather,
    global_views,
    gpt_parameters,
    overlaps,
    put,
    qkv_rows,
    repad_rows,
    scatter,
    take,
)
from tests.params.models import full_values

TINY = GptShape(
    num_layers=2,
    hidden_size=4,
    ffn_hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=2,
    padded_vocab_size=8,
    gated_linear_unit=True,
    add_bias_linear=False,
    normalization="RMSNorm",
)


@st.composite
def layouts(draw: st.DrawFn, layers: int, experts: int) -> Layout:
    """Layouts that can hold the shapes below: every cut axis is a multiple of 12."""
    tp, cp = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2)))
    pp = draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    ep = draw(st.sampled_from([n for n in (1, 2, 3) if experts and experts % n == 0] or [1]))
    etp = draw(st.sampled_from((1, 2, 3)))
    dp = ep * etp * draw(st.integers(1, 2))
    order = draw(st.sampled_from(("tp-cp-ep-dp-pp", "dp-ep-cp-tp-pp", "ep-dp-tp-cp-pp")))
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    counts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    return Layout(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=dp, order=order, layers_per_chunk=counts)


@st.composite
def models(draw: st.DrawFn, layout_count: int = 1) -> tuple[GptShape, tuple[Layout, ...]]:
    layers = draw(st.integers(1, 4))
    experts = draw(st.sampled_from((None, 3, 4, 6)))
    flag = st.booleans()
    predicts = draw(st.sampled_from((0, 0, 2)))  # not laid out with learned positions or tied embeddings
    shape = GptShape(
        num_layers=layers,
        hidden_size=12 if predicts else 3,
        ffn_hidden_size=12,
        num_attention_heads=12,
        num_query_groups=draw(st.sampled_from((None, 2, 6, 12))),
        kv_channels=3,
        padded_vocab_size=12,
        vocab_size=draw(st.sampled_from((None, 10, 12))),
        max_sequence_length=draw(st.sampled_from((0, 5))) * (not predicts),
        share_embeddings_and_output_weights=draw(flag) and not predicts,
        mtp_num_layers=predicts,
        gated_linear_unit=draw(flag),
        add_bias_linear=draw(flag),
        add_qkv_bias=draw(flag),
        attention_output_gate=draw(flag),
        learnable_softmax=draw(flag),
        qk_layernorm=draw(flag),
        normalization=draw(st.sampled_from(("LayerNorm", "RMSNorm"))),
        num_moe_experts=experts,
        moe_ffn_hidden_size=draw(st.sampled_from((None, 24))),
        moe_layers=tuple(draw(st.lists(flag, min_size=layers, max_size=layers))) if experts else (),
        moe_shared_expert_intermediate_size=draw(st.sampled_from((None, 24))),
        moe_shared_expert_gate=draw(flag),
        moe_router_enable_expert_bias=draw(flag),
    )
    return shape, tuple(draw(layouts(layers, experts or 0)) for _ in range(layout_count))


@settings(max_examples=30)
@given(models())
def test_primary_elements_of_every_replica_are_the_whole_model_exactly_once(
    case: tuple[GptShape, tuple[Layout, ...]],
) -> None:
    shape, (layout,) = case
    placement = Placement(shape, layout)
    counts = {
        (tensor.name, replica): torch.zeros(tensor.shape, dtype=torch.int)
        for tensor in placement.tensors
        for replica in range(layout.expert_dp if tensor.is_expert else layout.replicas)
    }
    for rank in range(layout.world_size):
        for placed in placement.on_rank(rank):
            if placed.is_primary:
                count = counts[placed.tensor.name, placed.replica]
                put(take(count, placed.slice) + 1, placed.slice, count)
    for key, count in counts.items():
        assert torch.equal(count, torch.ones_like(count)), key


@settings(max_examples=60)
@given(models())
def test_a_rank_holds_a_tensor_once_and_local_elements_are_all_accounted_for(
    case: tuple[GptShape, tuple[Layout, ...]],
) -> None:
    shape, (layout,) = case
    placement = Placement(shape, layout)
    for rank in range(layout.world_size):
        held = placement.on_rank(rank)
        assert len({placed.name for placed in held}) == len(held)
        for placed in held:
            assert sum(piece.numel for piece in placed.slice.pieces) == placed.slice.numel
            is_tied = placed.name == "output_layer.weight" and shape.share_embeddings_and_output_weights
            is_embedded_again = placed.name == "embedding.word_embeddings.weight" and placed.is_on_two_stages
            is_later = placed.chunk * layout.pp + layout.coordinates(rank).pp > 0
            assert placed.is_tied_copy == (is_tied or (is_embedded_again and is_later))


@settings(max_examples=15)
@given(models())
def test_gather_puts_together_what_scatter_cut(case: tuple[GptShape, tuple[Layout, ...]]) -> None:
    shape, (layout,) = case
    placement = Placement(shape, layout)
    values = full_values(placement.tensors)
    shards = [(held, scatter(values, held)) for held in map(placement.on_rank, range(layout.world_size))]
    gathered = gather(placement.tensors, shards)
    assert list(gathered) == list(values)
    for name, value in values.items():
        assert torch.equal(gathered[name], value), name


@settings(max_examples=40)
@given(models(layout_count=2))
def test_any_layout_can_be_filled_from_the_primaries_of_any_other(
    case: tuple[GptShape, tuple[Layout, ...]],
) -> None:
    shape, (old, new) = case
    source, target = Placement(shape, old), Placement(shape, new)
    values = full_values(source.tensors)
    senders: dict[str, list[tuple[object, torch.Tensor]]] = {}
    for rank in range(old.world_size):
        for placed in source.on_rank(rank):
            if placed.is_primary and placed.replica == 0:
                senders.setdefault(placed.tensor.name, []).append(
                    (placed.slice, take(values[placed.tensor.name], placed.slice))
                )
    for placed in target.on_rank(new.world_size - 1):
        received = torch.full(placed.slice.local_shape, math.nan)
        for held, local in senders[placed.tensor.name]:
            for common in overlaps(held, placed.slice):
                box = zip(common.target_start, common.source_start, common.shape, strict=True)
                here, there = zip(*((slice(a, a + n), slice(b, b + n)) for a, b, n in box), strict=True)
                received[here] = local[there]
        assert torch.equal(received, take(values[placed.tensor.name], placed.slice).float()), placed.name


@settings(max_examples=60)
@given(models())
def test_names_are_unique_and_units_follow_the_model(case: tuple[GptShape, tuple[Layout, ...]]) -> None:
    shape, (layout,) = case
    tensors = gpt_parameters(shape)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    layers = tuple(f"layer.{layer}" for layer in range(shape.num_layers))
    predicting = tuple(f"mtp_layer.{layer}" for layer in range(shape.mtp_num_layers))
    output = () if shape.share_embeddings_and_output_weights else ("output_layer",)
    assert Placement(shape, layout).units == ("embedding", *layers, *predicting, "final_norm", *output)
    assert all((tensor.unit == f"layer.{tensor.layer}") == (tensor.layer is not None) for tensor in tensors)


def test_a_distributed_optimizers_shards_reach_their_global_places() -> None:
    placement = Placement(TINY, Layout(tp=2, dp=2))
    values = full_values(placement.tensors)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    out = torch.zeros(placement.by_name[name].shape)
    for rank in range(4):
        placed = next(p for p in placement.on_rank(rank) if p.name == name)
        local = take(values[name], placed.slice).reshape(-1)
        start, stop = ((0, 13), (13, local.numel()))[placed.replica]  # not at a row's end, on purpose
        for global_start, view in global_views(placed.slice, local[start:stop].clone(), start, stop):
            box = tuple(slice(a, a + n) for a, n in zip(global_start, view.shape, strict=True))
            out[box] += view
    assert torch.equal(out, values[name])


def test_gate_and_up_rows_stay_paired_under_tensor_parallelism() -> None:
    placement = Placement(TINY, Layout(tp=2))
    rows = torch.arange(16)[:, None].expand(16, 4)
    for rank, expected in ((0, [0, 1, 2, 3, 8, 9, 10, 11]), (1, [4, 5, 6, 7, 12, 13, 14, 15])):
        placed = next(
            p for p in placement.on_rank(rank) if p.name == "decoder.layers.0.mlp.linear_fc1.weight"
        )
        assert take(rows, placed.slice)[:, 0].tolist() == expected


def test_qkv_rows_are_grouped_by_query_group() -> None:
    first, second = qkv_rows(TINY)
    assert (first.query, first.gate, first.key, first.value) == ((0, 4), (4, 4), (4, 6), (6, 8))
    assert (second.query, second.value) == ((8, 12), (14, 16))
    gated = qkv_rows(replace(TINY, attention_output_gate=True))
    assert (gated[0].query, gated[0].gate, gated[0].key) == ((0, 4), (4, 8), (8, 10))
    weight = next(t for t in gpt_parameters(TINY) if t.name.endswith("0.self_attention.linear_qkv.weight"))
    assert weight.shape == (16, 4)


def test_tied_embeddings_are_one_tensor_with_a_copy_on_the_last_stage() -> None:
    tied = replace(TINY, share_embeddings_and_output_weights=True)
    assert [t.shared_with for t in gpt_parameters(tied) if t.shared_with] == [("output_layer.weight",)]
    placement = Placement(tied, Layout(pp=2))
    first, last = placement.on_rank(0), placement.on_rank(1)
    embedding = next(p for p in first if p.tensor.name == "embedding.word_embeddings.weight")
    copy = next(p for p in last if p.tensor.name == "embedding.word_embeddings.weight")
    assert (embedding.name, embedding.is_primary, embedding.is_tied_copy) == (
        embedding.tensor.name,
        True,
        False,
    )
    assert (copy.name, copy.is_primary, copy.is_tied_copy) == ("output_layer.weight", False, True)
    assert copy.slice == embedding.slice
    assert {p.tensor.name for p in (*first, *last) if p.is_on_two_stages} == {embedding.tensor.name}
    assert not any(p.is_on_two_stages for p in Placement(tied, Layout()).on_rank(0))
    single = Counter(p.tensor.name for p in Placement(tied, Layout()).on_rank(0))
    assert single["embedding.word_embeddings.weight"] == 1


def test_the_stages_of_a_tensor_are_the_chunks_that_hold_it() -> None:
    tied = replace(TINY, num_layers=4, num_moe_experts=4, share_embeddings_and_output_weights=True)
    placement = Placement(tied, Layout(pp=2, vpp=2, ep=2, dp=2))
    found = {
        (tensor.name, stage): name
        for tensor in placement.tensors
        for stage, name in placement.stages_of(tensor)
    }
    held = {
        (placed.tensor.name, placed.chunk * 2 + pp): placed.name
        for pp in range(2)
        for rank in (2 * pp, 2 * pp + 1)
        for placed in placement.on_rank(rank)
    }
    assert found == held
    assert placement.stages_of(placement.tensors[0]) == (
        (0, "embedding.word_embeddings.weight"),
        (3, "output_layer.weight"),
    )
    experts = [
        placement.expert_rank(placement.by_name[f"decoder.layers.0.mlp.{name}"])
        for name in ("router.weight", "experts.1.linear_fc2.weight", "experts.2.linear_fc2.weight")
    ]
    assert experts == [None, 0, 1]


def test_gather_refuses_holes_and_copies_that_differ() -> None:
    placement = Placement(TINY, Layout(tp=2))
    values = full_values(placement.tensors)
    shards = [(held, scatter(values, held)) for held in map(placement.on_rank, range(2))]
    with pytest.raises(ParamsError, match=r"word_embeddings\.weight: some elements are held by no rank"):
        gather(placement.tensors, shards[:1])
    shards[1][1]["decoder.layers.0.input_layernorm.weight"][2] += 1
    with pytest.raises(ParamsError, match=r"layers\.0\.input_layernorm\.weight: two ranks hold different"):
        gather(placement.tensors, shards)


def test_equal_nans_of_a_diverged_model_can_be_gathered() -> None:
    placement = Placement(TINY, Layout(tp=2))
    values = full_values(placement.tensors)
    values["decoder.final_layernorm.weight"].fill_(math.nan)
    shards = [(held, scatter(values, held)) for held in map(placement.on_rank, range(2))]
    assert gather(placement.tensors, shards)["decoder.final_layernorm.weight"].isnan().all()


def test_scatter_refuses_missing_and_misshapen_values() -> None:
    placement = Placement(TINY, Layout())
    values = full_values(placement.tensors)
    values["output_layer.weight"] = torch.zeros(9, 4)
    with pytest.raises(ParamsError, match=r"output_layer\.weight: the value has shape \(9, 4\)"):
        scatter(values, placement.on_rank(0))
    del values["output_layer.weight"]
    with pytest.raises(ParamsError, match=r"no value for output_layer\.weight"):
        scatter(values, placement.on_rank(0))


def test_vocabulary_padding_can_change_but_never_cut_a_token_off() -> None:
    tensor = gpt_parameters(replace(TINY, vocab_size=5))[0]
    assert (tensor.shape, tensor.valid_rows) == ((8, 4), 5)
    value = torch.arange(32.0).reshape(8, 4)
    assert torch.equal(repad_rows(value, tensor, 6), value[:6])
    assert torch.equal(repad_rows(value, tensor, 10), torch.cat([value, torch.zeros(2, 4)]))
    assert repad_rows(value, tensor, 8) is value
    with pytest.raises(ParamsError, match="4 rows cannot hold the 5 rows of the vocabulary"):
        repad_rows(value, tensor, 4)
    assert gpt_parameters(TINY)[0].valid_rows is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_query_groups": 3}, "num_attention_heads 4 cannot be divided over num_query_groups 3; change one"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"vocab_size": 9}, r"vocab_size must be 1\.\.8"),
        ({"moe_layers": (True,), "num_moe_experts": 2}, "one entry per layer \\(2\\), got 1"),
        ({"moe_layers": (True, False)}, "num_moe_experts is not set"),
    ],
)
def test_impossible_models_are_refused_by_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        replace(TINY, **fields)


def test_layouts_that_cannot_hold_the_model_are_refused() -> None:
    with pytest.raises(ParamsError, match="ep is 2, but the model has no experts"):
        Placement(TINY, Layout(ep=2, dp=2))
    with pytest.raises(ParamsError, match="3 experts cannot be shared by ep = 2"):
        Placement(replace(TINY, num_moe_experts=3), Layout(ep=2, dp=2))
    with pytest.raises(ParamsError, match=r"word_embeddings\.weight.*block of 8 elements.*3 tensor parallel"):
        Placement(TINY, Layout(tp=3)).on_rank(0)
