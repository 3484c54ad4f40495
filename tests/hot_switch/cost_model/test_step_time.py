# SPDX-License-Identifier: Apache-2.0
"""The model of times and memory, against the same arithmetic by hand."""

from dataclasses import replace

import pytest

from megatron_ext.hot_switch import PRESETS, Bucket, Links, Strategy, StrategyList
from megatron_ext.hot_switch.cost_model.stages import stages_of, stages_together
from megatron_ext.hot_switch.cost_model.step_time import Coefficients, Machine, ModelledTimes, StepTimes
from megatron_ext.hot_switch.data.packing import plan_batch
from megatron_ext.params import Placement

SHAPE = PRESETS["llama-7b"]
MACHINE = Machine(
    operations=1e14, memory=80 * 2**30, links=Links(within_node=2e11, between_nodes=2e10), layer_overhead=1e-4
)
TIMES = ModelledTimes(shape=SHAPE, machine=MACHINE)


def strategy(dp: int, tp: int, pp: int) -> Strategy:
    return Strategy(dp=dp, tp=tp, pp=pp, sequence_parallel=tp > 1)


def test_one_gpu_does_six_operations_per_matrix_element_and_position() -> None:
    found = TIMES.of(strategy(1, 1, 1))
    per_layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 2 * 4096
    assert found.linear == pytest.approx(6 * (32 * per_layer + 30592 * 4096) / 1e14)
    assert found.squared == pytest.approx(6 * 4096 * 32 / 1e14)
    assert found.constant == pytest.approx(32e-4)


def test_tensor_parallelism_shares_the_work_and_pays_four_all_reduces_per_layer() -> None:
    one, four = TIMES.of(strategy(4, 1, 1)), TIMES.of(strategy(1, 4, 1))
    assert four.squared == pytest.approx(one.squared / 4)
    assert four.linear == pytest.approx(one.linear / 4 + 32 * 4 * (2 * 3 / 4) * 2 * 4096 / 2e11)
    across_nodes = TIMES.of(strategy(1, 16, 1))
    assert across_nodes.linear > 32 * 4 * (2 * 15 / 16) * 2 * 4096 / 2e10


def test_measured_times_take_the_place_of_modelled_ones() -> None:
    measured = Coefficients(squared=1e-9, linear=2e-5, constant=3e-2)
    times = ModelledTimes(shape=SHAPE, machine=MACHINE, measured={(4, 2): measured})
    assert times.of(strategy(1, 4, 2)) == measured
    assert times.of(strategy(2, 4, 1)) == TIMES.of(strategy(2, 4, 1))
    assert measured.seconds(squares=5e6, positions=3000) == pytest.approx(0.005 + 0.06 + 0.03)


def test_a_pipeline_of_p_stages_and_m_rows_takes_m_plus_p_minus_1_times_a_row() -> None:
    times = StepTimes(times=TIMES)
    chosen = strategy(2, 1, 4)
    listed = StrategyList(strategies=(chosen,), buckets=(Bucket(above=0, up_to=100),))
    lengths = [100] * 6
    (batch,) = plan_batch(lengths, listed)
    assert batch is not None
    row = TIMES.of(chosen).seconds(squares=100**2, positions=100)
    computed = times.seconds(chosen, batch, lengths) - times.gradient_seconds(chosen)
    assert computed == pytest.approx((3 + 4 - 1) * row)


def test_attention_over_whole_rows_counts_their_length_instead_of_the_documents() -> None:
    chosen = strategy(1, 1, 1)
    listed = StrategyList(strategies=(chosen,), buckets=(Bucket(above=0, up_to=100),))
    lengths = [60, 30, 10]
    (batch,) = plan_batch(lengths, listed)
    assert batch is not None and batch.row_length == 100
    apart, whole = StepTimes(times=TIMES), StepTimes(times=TIMES, attention="rows")
    difference = whole.seconds(chosen, batch, lengths) - apart.seconds(chosen, batch, lengths)
    assert difference == pytest.approx(TIMES.of(chosen).squared * (100**2 - 60**2 - 30**2 - 10**2))


UNFUSED = replace(TIMES, unfused_attention=True)


def test_unfused_attention_computes_what_is_masked_too() -> None:
    fused, unfused = TIMES.of(strategy(1, 1, 1)), UNFUSED.of(strategy(1, 1, 1))
    assert unfused == replace(fused, squared=2 * fused.squared)
    measured = replace(UNFUSED, measured={(1, 1): fused})
    assert measured.of(strategy(1, 1, 1)) == fused


def test_unfused_attention_keeps_its_weights_in_every_layer() -> None:
    chosen = strategy(2, 4, 1)
    fused = StepTimes(times=TIMES, attention="rows").memory(chosen, 16384, chosen)
    unfused = StepTimes(times=UNFUSED, attention="rows").memory(chosen, 16384, chosen)
    # 8 of the 32 heads are on a rank, 512 MiB each, in 32 layers; one more is what the last of them is made from.
    assert unfused - fused == pytest.approx(33 * 8 * 512 * 2**20)


def test_layers_that_are_computed_again_keep_their_input_and_make_a_third_pass_forward() -> None:
    chosen = strategy(2, 4, 1)
    once, again = StepTimes(times=TIMES), StepTimes(times=replace(TIMES, recompute="full"))
    saved = once.memory(chosen, 1000, chosen) - again.memory(chosen, 1000, chosen)
    assert saved == pytest.approx(1000 * 31 * (34 - 2) * 4096 / 4)
    before, after = once.times.of(chosen), again.times.of(chosen)
    assert (after.squared, after.constant) == pytest.approx((4 / 3 * before.squared, 4 / 3 * before.constant))
    # The output layer is computed once; a layer's activations are summed over TP ranks six times in place of four.
    output = 6 * SHAPE.padded_vocab_size * SHAPE.hidden_size / 4 / MACHINE.operations
    exchange = 4 * 32 * (2 * 3 / 4) * 2 * 4096 / MACHINE.links.within_node
    layers = before.linear - output - exchange
    assert after.linear == pytest.approx(4 / 3 * layers + output + 6 / 4 * exchange)


def test_measured_times_grow_with_what_is_computed_again_as_modelled_ones_do() -> None:
    chosen = strategy(2, 4, 1)
    once, again = TIMES.of(chosen), replace(TIMES, recompute="full").of(chosen)
    slower = Coefficients(squared=2 * once.squared, linear=3 * once.linear, constant=5 * once.constant)
    measured = replace(TIMES, recompute="full", measured={(4, 1): slower}).of(chosen)
    expected = (2 * again.squared, 3 * again.linear, 5 * again.constant)
    assert (measured.squared, measured.linear, measured.constant) == pytest.approx(expected)


def test_scores_that_are_computed_again_are_kept_in_one_layer() -> None:
    chosen = strategy(2, 4, 1)
    kept, again = StepTimes(times=UNFUSED), StepTimes(times=replace(UNFUSED, recompute="selective"))
    saved = kept.memory(chosen, 16384, chosen) - again.memory(chosen, 16384, chosen)
    assert saved == pytest.approx(31 * 8 * 512 * 2**20)
    before, after = kept.times.of(chosen), again.times.of(chosen)
    assert after == replace(before, squared=after.squared)
    assert after.squared == pytest.approx(4 / 3 * before.squared)


def test_memory_is_parameters_of_home_and_guest_and_the_activations_of_all_layers() -> None:
    times = StepTimes(times=TIMES)
    home, guest = strategy(2, 4, 1), strategy(4, 2, 1)
    total = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 2 * 4096) + 2 * 30592 * 4096 + 2 * 4096
    activations = 1000 * (32 * 34 * 4096 / 4 + 8 * 30592 / 4)
    alone = times.memory(home, 1000, home)
    assert alone == pytest.approx(total / 4 * (6 + 12 / 2) + activations, rel=1e-3)
    with_guest = times.memory(guest, 1000, home)
    assert with_guest == pytest.approx(total / 4 * (6 + 12 / 2) + total / 2 * 6 + 2 * activations, rel=1e-3)
    # Sums of gradients in fp32: at home those of its guests, at a guest those of the one before.
    assert times.memory(home, 1000, home, switches=True) - alone == pytest.approx(total / 4 * 4, rel=1e-3)
    assert times.memory(guest, 1000, home, receives=True) - with_guest == pytest.approx(total / 2 * 4, rel=1e-3)


def test_memory_of_a_pipeline_is_that_of_its_fullest_stage() -> None:
    times = StepTimes(times=TIMES)
    chosen = strategy(2, 1, 4)
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 2 * 4096
    # The first stage has the embedding and waits for four micro-batches, the last has output layer, norm and logits.
    first = (8 * layer + 30592 * 4096) * (6 + 12 / 2) + 1000 * 4 * 8 * 34 * 4096
    last = (8 * layer + 30592 * 4096 + 2 * 4096) * (6 + 12 / 2) + 1000 * (8 * 34 * 4096 + 8 * 30592)
    assert first > last
    assert times.memory(chosen, 1000, chosen) == pytest.approx(first)
    assert times.memory(chosen, 0, chosen) == pytest.approx(last - 1000 * (8 * 34 * 4096 + 8 * 30592))


def test_a_tied_embedding_is_on_the_first_and_on_the_last_stage() -> None:
    tied = ModelledTimes(shape=replace(SHAPE, share_embeddings_and_output_weights=True), machine=MACHINE)
    apart, chosen = StepTimes(times=TIMES), strategy(1, 1, 4)
    assert StepTimes(times=tied).memory(chosen, 0, chosen) == apart.memory(chosen, 0, chosen)
    # On one stage the output layer is the embedding.
    whole = strategy(4, 1, 1)
    difference = apart.memory(whole, 0, whole) - StepTimes(times=tied).memory(whole, 0, whole)
    assert difference == pytest.approx(30592 * 4096 * (6 + 12 / 4))


def test_memory_of_home_and_guest_is_that_of_a_rank_which_has_both_stages() -> None:
    times = StepTimes(times=TIMES)
    home, guest = strategy(1, 2, 4), strategy(4, 1, 2)
    # Rank 2 has home's second stage and the guest's first one, with the embedding.
    of_home, of_guest = stages_of(SHAPE, home), stages_of(SHAPE, guest)
    pairs = list(stages_together(SHAPE, guest, home))
    assert pairs == [(of_guest[guest_stage], of_home[stage]) for stage, guest_stage in enumerate((0, 0, 1, 1))]
    layout_of_home, layout_of_guest = (one.layout(SHAPE.num_layers) for one in (home, guest))
    for rank in range(8):
        together = pairs[rank // 2]
        assert together[0] == of_guest[layout_of_guest.coordinates(rank).pp]
        assert together[1] == of_home[layout_of_home.coordinates(rank).pp]
    held = of_home[3].elements * (6 + 12) + of_guest[1].elements * 6
    assert times.memory(guest, 0, home) == pytest.approx(held)


def test_a_stage_holds_what_the_placement_of_its_ranks_says() -> None:
    shape = replace(SHAPE, num_layers=4, num_moe_experts=8, moe_ffn_hidden_size=512)
    chosen = Strategy(dp=4, tp=2, pp=2, ep=4, sequence_parallel=True)
    placement = Placement(shape, chosen.layout(4))
    for stage, first in zip(stages_of(shape, chosen), (0, 8), strict=True):
        for rank in range(first, first + 8):
            assert stage.elements == sum(placed.slice.numel for placed in placement.on_rank(rank))
    # Of a dense parameter there are 4 replicas, of an expert 1.
    (one, _) = stages_of(shape, chosen)
    experts = 2 * 2 * 3 * 4096 * 512 // 2
    assert one.optimizer_elements == pytest.approx(experts + (one.elements - experts) / 4)


def test_the_time_of_a_step_is_divided_into_computing_waiting_and_reducing() -> None:
    times, chosen, lengths = StepTimes(times=TIMES), strategy(2, 1, 2), [1000, 1000, 1000]
    (batch,) = plan_batch(lengths, StrategyList(strategies=(chosen,), buckets=(Bucket(above=0, up_to=1000),)))
    assert batch is not None
    row, empty = (TIMES.of(chosen).seconds(squares, 1000) for squares in (1000**2, 0))
    # Three rows for two replicas: the second one has a row of zero weight, which is computed as well.
    parts = times.parts(chosen, batch, lengths)
    assert parts.computing == pytest.approx((3 * row + empty) / 2)
    assert parts.waiting == pytest.approx(3 * row - parts.computing)
    assert parts.reducing == times.gradient_seconds(chosen) > 0
    assert times.seconds(chosen, batch, lengths) == parts.seconds
