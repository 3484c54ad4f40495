# SPDX-License-Identifier: Apache-2.0
"""The model of times and memory, against the same arithmetic by hand."""

import pytest

from megatron_ext.hot_switch import PRESETS, Bucket, Links, Strategy, StrategyList
from megatron_ext.hot_switch.packing import plan_batch
from megatron_ext.hot_switch.step_time import Coefficients, Machine, ModelledTimes, StepTimes

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


def test_unfused_attention_keeps_its_weights_in_every_layer() -> None:
    chosen = strategy(2, 4, 1)
    fused = StepTimes(times=TIMES, attention="rows").memory(chosen, 16384, chosen)
    unfused = StepTimes(times=TIMES, attention="rows", keeps_scores=True).memory(chosen, 16384, chosen)
    # 8 of the 32 heads are on a rank, 512 MiB each, in 32 layers; one more is what the last of them is made from.
    assert unfused - fused == pytest.approx(33 * 8 * 512 * 2**20)


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
