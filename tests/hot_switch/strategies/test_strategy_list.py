# SPDX-License-Identifier: Apache-2.0
"""Strategies and buckets as users write them: their order, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.hot_switch import PRESETS, Bucket, Strategy, check_strategies, read_strategies
from megatron_ext.hot_switch.strategies.guest_experts import experts_fit, experts_of_guest
from megatron_ext.hot_switch.strategies.pipeline_stages import stages_of_guest
from megatron_ext.params import GptShape
from megatron_ext.params.layer_parts import LayerBlock

LLAMA = PRESETS["llama-7b"]
MOE = replace(LLAMA, num_moe_experts=8, moe_ffn_hidden_size=1536, moe_shared_expert_intermediate_size=1020)
NARROW_LAYERS = replace(
    LLAMA,
    num_layers=2,
    num_attention_heads=36,
    layer_blocks=(
        LayerBlock(parts=("attention", "mlp"), num_query_groups=4, ffn_hidden_size=100),
        LayerBlock(parts=("attention_linear",)),
    ),
)


def test_home_is_first_and_runs_last_and_guests_run_shortest_bucket_first() -> None:
    chosen = read_strategies(["1,4,2", "8,1,1", "2,2,2"], [16384, 8192, 4096, 0])
    home, short, middle = chosen.strategies
    assert home == Strategy(dp=1, tp=4, pp=2) == chosen.home
    assert chosen.execution_order == (short, middle, home)
    assert chosen.buckets == (
        Bucket(above=8192, up_to=16384),
        Bucket(above=0, up_to=4096),
        Bucket(above=4096, up_to=8192),
    )
    assert chosen.switches == ((home, short), (short, middle), (middle, home))


def test_one_strategy_never_switches() -> None:
    chosen = read_strategies(["8,1,1"], [4096, 0])
    assert chosen.switches == ()
    assert chosen.buckets == (Bucket(above=0, up_to=4096),)


def test_two_strategies_switch_there_and_back() -> None:
    assert [(a.label, b.label) for a, b in read_strategies(["1,4,2", "8,1,1"]).switches] == [
        ("1,4,2", "8,1,1"),
        ("8,1,1", "1,4,2"),
    ]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_ranks_are_numbered_as_hotspa_does(dp: int, tp: int, pp: int) -> None:
    layout = Strategy(dp=dp, tp=tp, pp=pp).layout(pp)
    for stage in range(pp):
        for replica in range(dp):
            for shard in range(tp):
                place = layout.coordinates(stage * (dp * tp) + replica * tp + shard)
                assert (place.pp, place.dp, place.tp) == (stage, replica, shard)


def test_uneven_stages_reach_the_layout() -> None:
    strategy = Strategy(dp=1, tp=1, pp=4, first_stage_layers=7, last_stage_layers=5)
    assert strategy.layout(32).layers_per_chunk == (7, 10, 10, 5)
    assert strategy.label == "1,1,4 first7 last5"
    assert check_strategies([strategy], shape=LLAMA).home is strategy


def test_a_label_names_every_size_that_is_not_one() -> None:
    assert Strategy(dp=2, tp=2, pp=2, cp=2, ep=4, etp=1, vpp=2).label == "2,2,2 cp2 ep4 vpp2"
    assert Strategy(dp=2, tp=4, pp=1, etp=2).label == "2,4,1 etp2"


def test_listed_stages_reach_the_layout_and_megatron() -> None:
    strategy = Strategy(dp=1, tp=1, pp=2, vpp=2, stage_layers=(0, 15, 16, 1))
    assert strategy.layout(32).layers_per_chunk == (0, 15, 16, 1)
    assert strategy.label == "1,1,2 vpp2 layers0-15-16-1"
    assert Strategy(dp=1, tp=1, pp=2, stage_layers=(2, 0)).stages_text() == "Ett|L"
    assert Strategy(dp=1, tp=1, pp=2, stage_layers=(1, 1)).stages_text(2) == "Et|tmmL"
    assert check_strategies([strategy], shape=LLAMA).home is strategy


@given(st.integers(1, 40), st.integers(1, 8))
def test_guests_with_other_stages_than_home_have_them_as_even_as_layers_divide(layers: int, pp: int) -> None:
    guest = stages_of_guest(Strategy(dp=1, tp=1, pp=pp), Strategy(dp=pp, tp=1, pp=9, vpp=2), layers)
    assert guest.vpp == 1
    counts = guest.stage_layers or (layers // pp,) * pp
    if layers >= pp:
        assert sum(counts) == layers and max(counts) - min(counts) <= 1
        assert counts[-1] == min(counts) and (counts[0] == min(counts) or pp == 2 or set(counts[1:-1]) == {counts[0]})


@given(st.integers(1, 100), st.integers(2, 5), st.integers(0, 6))
def test_the_interleaved_schedule_gets_the_micro_batches_that_it_can_run(count: int, pp: int, more: int) -> None:
    strategy = Strategy(dp=1, tp=1, pp=pp, vpp=2, micro_batch_group=pp + more)
    runnable = strategy.runnable_micro_batches(count)
    assert runnable >= max(count, pp + more)
    assert runnable % (pp + more) == 0 or runnable % (pp + more) >= pp
    assert runnable - max(count, pp + more) < pp
    assert Strategy(dp=1, tp=1, pp=pp).runnable_micro_batches(count) == count


@pytest.mark.parametrize("text", ["1,4", "1,4,2,1", "1;4;2", "a,b,c", "", "1,,2", "-1,4,2", "1.5,4,2", "\u0661,4,2"])
def test_a_strategy_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not of the form dp,tp,pp; write three numbers"):
        read_strategies([text])


def test_spaces_in_a_strategy_do_not_matter() -> None:
    assert read_strategies([" 1, 4, 2"]).home == Strategy(dp=1, tp=4, pp=2)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ([4096, 0], "2 strategies need 3 bucket sizes (every bucket's upper bound, then 0), but there are 2: 4096 0"),
        ([], "but there are 0: none"),
        ([4096, 8192, 0], "bucket sizes 4096 8192 0 do not descend; sort them"),
        ([8192, 8192, 0], "bucket sizes 8192 8192 0 do not descend"),
        ([8192, 4096, 1024], "the last bucket size is 1024; end the list with 0"),
        ([16384, 4096, 0], "the first bucket size is 16384, but the sequence length is 8192; make them equal"),
    ],
)
def test_bucket_sizes_that_do_not_fit_are_refused(sizes: list[int], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        read_strategies(["1,4,2", "8,1,1"], sizes, seq_length=8192)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "shape", "complaint"),
    [
        ({"tp": 5}, LLAMA, "32 attention heads cannot be divided over tp = 5; use a tp that divides 32"),
        ({"tp": 3}, LLAMA, "ffn_hidden_size 11008 cannot be divided over tp = 3"),
        ({"tp": 6}, replace(LLAMA, num_query_groups=4, num_attention_heads=36), "tp = 6 is neither a divisor nor a"),
        ({"tp": 3}, NARROW_LAYERS, "ffn_hidden_size 100 cannot be divided over tp = 3; change"),
        ({"tp": 6}, NARROW_LAYERS, "tp = 6 is neither a divisor nor a multiple of the 4 query groups"),
        ({"tp": 3}, NARROW_LAYERS, "hidden_size 4096 cannot be divided over tp = 3; change"),
        ({"tp": 3}, LLAMA, "a vocabulary of 30592 rows cannot be divided over tp = 3; pad it to 30594, which suits"),
        ({"pp": 3}, LLAMA, "32 layers cannot be divided over pp*vpp = 3 chunks; use sizes that divide them, or first"),
        ({"pp": 4, "vpp": 3}, LLAMA, "32 layers cannot be divided over pp*vpp = 12 chunks"),
        ({"pp": 4, "first_stage_layers": 4}, LLAMA, "28 layers cannot be split evenly over 3 pipeline stages; change"),
        ({"first_stage_layers": 32}, LLAMA, "first_stage_layers and last_stage_layers are for pp above 1; leave them"),
        ({"pp": 2, "first_stage_layers": 32}, LLAMA, "would have 32, 0 of 32 layers, and each needs one"),
        ({"pp": 2, "stage_layers": (16,)}, LLAMA, "stage_layers lists 1 chunks, but pp*vpp is 2; give one number"),
        ({"pp": 2, "stage_layers": (16, 15)}, LLAMA, "stage_layers adds up to 31, but the model has 32 layers; change"),
        ({"pp": 3, "stage_layers": (16, 0, 16)}, LLAMA, "every chunk but the first and the last needs a layer; change"),
        ({"pp": 2, "stage_layers": (1, 31), "last_stage_layers": 31}, LLAMA, "leave first_stage_layers and last_stage"),
        ({"pp": 4, "vpp": 2, "micro_batch_group": 3}, LLAMA, "micro_batch_group is 3, but a group must fill 4 stages"),
        ({"pp": 1, "vpp": 2}, LLAMA, "vpp is 2, but interleaving needs pp > 1; use vpp 1 or more stages"),
        ({"ep": 2}, LLAMA, "ep is 2, but the model has no experts; use ep 1"),
        ({"dp": 3, "ep": 3}, MOE, "8 experts cannot be divided over ep = 3; use an ep that divides them"),
        ({"dp": 5, "etp": 5}, MOE, "moe_ffn_hidden_size 1536 cannot be divided over etp = 5"),
        ({"tp": 8}, MOE, "moe_shared_expert_intermediate_size 1020 cannot be divided over tp = 8"),
        ({"ep": 4}, MOE, "2 ranks cannot be divided by etp*ep*pp = 4; change ep or etp"),
        ({"dp": 0}, LLAMA, "dp is 0; use 1 or more"),
        ({"micro_batch_size": 0}, LLAMA, "micro_batch_size is 0; use 1 or more"),
        ({"etp": 0}, LLAMA, "etp is 0; use 1 or more"),
        ({"recompute": "some"}, LLAMA, "recompute is 'some'; use one of none, selective, full"),
        ({"sequence_parallel": True}, LLAMA, "sequence_parallel needs tp > 1; leave it out"),
    ],
)
def test_a_strategy_that_cannot_hold_the_model_is_refused_with_a_fix(
    fields: dict[str, object], shape: GptShape, complaint: str
) -> None:
    strategy = Strategy(**{"dp": 2, "tp": 1, "pp": 1, **fields})
    with pytest.raises(UserError) as caught:
        check_strategies([strategy], shape=shape)
    assert f"strategy {strategy.label}: " in str(caught.value)
    assert complaint in str(caught.value)


def test_more_tensor_parallel_ranks_than_query_groups_are_legal() -> None:
    read_strategies(["1,8,1"], shape=replace(LLAMA, num_query_groups=4))


def test_rows_must_be_divisible_over_context_and_sequence_parallel_ranks() -> None:
    home = Strategy(dp=1, tp=4, pp=1, cp=2, sequence_parallel=True)
    guest, other = Strategy(dp=8, tp=1, pp=1), Strategy(dp=4, tp=1, pp=1, cp=2)
    check_strategies([home, guest, other], [4096, 1000, 998, 0])
    with pytest.raises(UserError, match=r"strategy 4,1,1 cp2: rows of its bucket, 1002 tokens, cannot be divided by 4"):
        check_strategies([home, guest, other], [4096, 1002, 998, 0])
    with pytest.raises(
        UserError, match=r"strategy 1,4,1 cp2: rows of its bucket, 4100 tokens, cannot be divided by 16"
    ):
        check_strategies([home, guest], [4100, 1000, 0])


def test_every_strategy_must_use_all_ranks() -> None:
    with pytest.raises(UserError, match=r"strategy 4,1,1 is for 4 ranks, but the first strategy, 1,4,2, has 8"):
        read_strategies(["1,4,2", "4,1,1"])
    with pytest.raises(UserError, match=r"strategy 1,4,2 is for 8 ranks, but the job has 16; .* dp\*tp\*pp\*cp is 16"):
        read_strategies(["1,4,2", "16,1,1"], world_size=16)


def test_all_problems_are_told_together() -> None:
    with pytest.raises(UserError) as caught:
        read_strategies(["1,3,2", "x", "0,1,1", "8,1,1"], [4, 8, 1], seq_length=9, shape=LLAMA)
    text = str(caught.value)
    for part in (
        "10 problems",
        '"x" is not of the form',
        "dp is 0",
        "attention heads",
        "ffn_hidden_size",
        "vocabulary",
    ):
        assert part in text
    for part in ("is for 8 ranks", "4 strategies need 5", "do not descend", "the last bucket size is 1", "is 4, but"):
        assert part in text


def test_no_strategy_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="there is no strategy; give at least one"):
        read_strategies([])


@pytest.mark.parametrize(
    ("guest", "home", "stages_first", "expected"),
    [
        ({"dp": 4, "tp": 2}, {"dp": 8, "ep": 8}, False, (8, 1)),
        ({"dp": 8, "tp": 1}, {"dp": 2, "tp": 4, "ep": 2, "etp": 1}, False, (2, None)),
        ({"dp": 1, "tp": 2, "pp": 4}, {"dp": 8, "ep": 8}, False, (2, 1)),
        ({"dp": 2, "pp": 2, "cp": 2}, {"tp": 2, "pp": 2, "cp": 2, "etp": 4}, True, (1, 2)),
        ({"dp": 1, "tp": 4, "pp": 2}, {"dp": 4, "pp": 2, "ep": 1}, True, (1, None)),
        ({"dp": 2, "tp": 2, "pp": 2}, {"dp": 4, "tp": 1, "pp": 2, "ep": 4}, True, (2, 1)),
    ],
)
def test_guests_cut_experts_as_home_does_or_as_near_to_it_as_fits(guest, home, stages_first, expected) -> None:
    sizes = {"dp": 1, "tp": 1, "pp": 1}
    home = Strategy(**{**sizes, **home})
    given_sizes = {"ep": home.ep, "etp": home.etp}
    found = experts_of_guest(
        Strategy(**{**sizes, **guest, **given_sizes}), home, has_experts=True, stages_before_replicas=stages_first
    )
    assert (found.ep, found.etp if expected[1] is not None else None) == (expected[0], expected[1])
    assert experts_fit(found, stages_before_replicas=stages_first)
    assert found.sequence_parallel == (found.tp > 1)
