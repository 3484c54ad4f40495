# SPDX-License-Identifier: Apache-2.0

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.params import Coordinates, Layout, ParamsError, shard_range, uneven_layers
from tests.support.distributed import run_ranks

sizes = st.integers(1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, cp, ep, etp, spare = (draw(sizes) for _ in range(6))
    expert_ranks = etp * ep
    # dp is chosen so that the expert grid fits.
    dp = expert_ranks * spare
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    return Layout(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, etp=etp)


@given(layouts())
def test_every_rank_has_its_own_place_on_both_grids(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len({(p.tp, p.cp, p.dp, p.pp) for p in places}) == layout.world_size
    assert len({(p.etp, p.ep, p.edp, p.pp) for p in places}) == layout.world_size


@given(layouts())
def test_replicas_of_a_place_are_numbered_without_gaps(layout: Layout) -> None:
    for is_expert, replicas in ((False, layout.replicas), (True, layout.expert_dp)):
        seen: dict[tuple[int, ...], set[int]] = {}
        for rank in range(layout.world_size):
            place = layout.coordinates(rank)
            shard = (place.pp, place.etp, place.ep) if is_expert else (place.pp, place.tp)
            seen.setdefault(shard, set()).add(layout.replica(place, is_expert))
        assert all(numbers == set(range(replicas)) for numbers in seen.values())


def _compare_with_megatron() -> int:
    from megatron.core.parallel_state import RankGenerator

    compared = 0
    for tp, cp, dp, pp, ep, etp in (
        (2, 1, 2, 2, 2, 2),
        (2, 2, 2, 1, 2, 1),
        (1, 2, 4, 3, 4, 1),
        (4, 1, 2, 2, 2, 1),
        (2, 1, 4, 1, 2, 4),
    ):
        for order in map("-".join, permutations(("tp", "cp", "ep", "dp", "pp"))):
            if "ep-dp" not in order and "dp-ep" not in order:
                continue  # Megatron refuses it
            layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order=order)
            dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
            expert = RankGenerator(tp=etp, ep=ep, dp=layout.expert_dp, pp=pp, cp=1, order=order)
            if dense.get_ranks("pp") != expert.get_ranks("pp"):
                with pytest.raises(ParamsError, match="different pipeline stages"):
                    [layout.coordinates(rank) for rank in range(layout.world_size)]
                continue
            for generator, pairs in (
                (dense, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
                (expert, {"tp": "etp", "ep": "ep", "dp": "edp"}),
            ):
                for token, field in pairs.items():
                    for group in generator.get_ranks(token):
                        places = [getattr(layout.coordinates(rank), field) for rank in group]
                        assert places == list(range(len(group))), (layout, token)
                        compared += 1
    return compared


def test_coordinates_are_those_of_megatrons_rank_generator_in_any_order() -> None:
    assert run_ranks(_compare_with_megatron, 1)[0] > 1000


@given(layouts(), st.integers(0, 3))
def test_the_chunks_of_an_even_split_follow_each_other(layout: Layout, layers_per_chunk: int) -> None:
    chunks = layout.pp * layout.vpp
    layers = layout.chunk_layers(chunks * layers_per_chunk)
    assert [layer for chunk in layers for layer in chunk] == list(range(chunks * layers_per_chunk))
    assert {len(chunk) for chunk in layers} == {layers_per_chunk}


def _uneven_cases_of_megatron() -> int:
    from types import SimpleNamespace

    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    compared = 0
    for pp, vpp in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 3)):
        for layers in range(1, 15):
            for first, last, embedding, loss in (
                (None, None, False, False),
                (None, None, True, False),
                (None, None, False, True),
                (None, None, True, True),
                (1, None, False, False),
                (2, None, False, False),
                (None, 2, False, False),
                (2, 4, False, False),
                (3, 3, False, False),
            ):
                config = SimpleNamespace(
                    num_layers=layers,
                    pipeline_model_parallel_size=pp,
                    pipeline_model_parallel_layout=None,
                    virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
                    num_layers_in_first_pipeline_stage=first,
                    num_layers_in_last_pipeline_stage=last,
                    account_for_embedding_in_pipeline_split=embedding,
                    account_for_loss_in_pipeline_split=loss,
                )
                if pp == 2 and vpp > 1 and first and last:
                    continue  # Megatron divides by its number of middle stages
                try:
                    counts = uneven_layers(
                        layers,
                        pp=pp,
                        vpp=vpp,
                        first=first,
                        last=last,
                        embedding_counts=embedding,
                        loss_counts=loss,
                    )
                except ParamsError:
                    continue
                chunks = Layout(pp=pp, vpp=vpp, layers_per_chunk=counts).chunk_layers(layers)
                for index, chunk in enumerate(chunks):
                    stage = index // pp if vpp > 1 else None
                    rank = index % pp
                    assert get_num_layers_to_build(config, stage, rank) == len(chunk), (config, index)
                    assert get_transformer_layer_offset(config, stage, rank) == chunk.start, (config, index)
                    compared += 1
    return compared


def test_uneven_pipelines_are_cut_as_megatron_cuts_them() -> None:
    assert run_ranks(_uneven_cases_of_megatron, 1)[0] > 300


@given(st.data())
def test_the_shards_of_a_bucket_own_every_element_exactly_once(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    used = sum(sizes)
    bucket = used + (-used) % ranks
    start = 0
    for size in sizes:
        owned = [shard_range(start, start + size, bucket, rank, ranks) for rank in range(ranks)]
        elements = [element for first, end in owned for element in range(first, end)]
        assert sorted(elements) == list(range(size))
        start += size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"etp": 0}, "etp must be at least 1 or None"),
        ({"vpp": 2}, "interleaving needs pp > 1"),
        ({"order": "tp-dp-pp"}, "order must name tp, cp, ep, dp and pp once each"),
        ({"ep": 3, "dp": 2}, "2 ranks .* cannot be divided by .* 3"),
        ({"pp": 2, "prediction_chunk": 2}, "prediction_chunk must be from 0 to 1, got 2"),
        ({"pp": 2, "layers_per_chunk": (1,)}, "layers_per_chunk must have pp\\*vpp = 2 entries"),
    ],
)
def test_impossible_layouts_are_refused_by_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        Layout(**fields)


def test_layers_that_do_not_fit_the_chunks_are_refused() -> None:
    with pytest.raises(ParamsError, match=r"5 layers cannot be split evenly over .* 2 chunks"):
        Layout(pp=2).chunk_layers(5)
    with pytest.raises(ParamsError, match="adds up to 4, the model has 5"):
        Layout(pp=2, layers_per_chunk=(1, 3)).chunk_layers(5)
    with pytest.raises(ParamsError, match="4 layers cannot be split evenly over 3 pipeline stages"):
        uneven_layers(6, pp=4, first=2)
    with pytest.raises(ParamsError, match="cannot be combined"):
        uneven_layers(6, pp=2, first=2, loss_counts=True)
    with pytest.raises(ParamsError, match="layers of stage 0 cannot be split over 2 chunks"):
        uneven_layers(6, pp=2, vpp=2)


def test_a_rank_outside_the_layout_is_refused() -> None:
    assert Layout(tp=2).coordinates(1) == Coordinates(tp=1, etp=1)
    with pytest.raises(ParamsError, match=r"rank 2 is outside 0\.\.1"):
        Layout(tp=2).coordinates(2)
