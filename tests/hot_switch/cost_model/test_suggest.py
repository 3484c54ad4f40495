# SPDX-License-Identifier: Apache-2.0
"""What is suggested fits, trains every sequence, and is never slower than the best single strategy."""

from dataclasses import replace

import pytest

from megatron_ext.errors import UserError
from megatron_ext.hot_switch import PRESETS, Links, measure_plan, plan_switch, read_strategies
from megatron_ext.hot_switch.cost_model.step_time import Machine, ModelledTimes, StepTimes
from megatron_ext.hot_switch.cost_model.suggest import Suggester, candidates
from megatron_ext.params import Layout

SHAPE = replace(PRESETS["llama-3b"], num_layers=8)
MACHINE = Machine(operations=1e14, memory=0, links=Links(within_node=1e11, between_nodes=1e10))
LONG_TAILED = [100] * 40 + [500] * 20 + [2000] * 6 + [8192] * 2


def suggester(lengths: list[int] = LONG_TAILED, memory_gib: float = 2.6, context: int = 8192) -> Suggester:
    machine = replace(MACHINE, memory=memory_gib * 2**30)
    times = StepTimes(times=ModelledTimes(shape=SHAPE, machine=machine))
    return Suggester(times, gpus=8, lengths=lengths, context=context)


def test_candidates_use_all_gpus_and_suit_the_model() -> None:
    found = candidates(suggester().times, 8)
    assert {(one.dp, one.tp, one.pp) for one in found} == {
        (dp, tp, pp) for dp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if dp * tp * pp == 8
    }
    assert all(one.sequence_parallel == (one.tp > 1) for one in found)


def test_short_sequences_get_data_parallelism_where_the_context_needs_model_parallelism() -> None:
    chosen = suggester()
    static, best = chosen.static()[0], chosen.best([2048, 1024])
    assert best.seconds < static.seconds
    home, *guests = best.strategies.strategies
    assert guests
    assert all(guest.dp > home.dp for guest in guests)
    assert sum(best.sequences) == len(LONG_TAILED)
    assert all(held <= 2.6 * 2**30 for held in best.memory)
    assert best.switching > 0
    # It can be given as it is printed.
    bounds = [8192, *sorted({bucket.up_to for bucket in best.strategies.buckets} - {8192}, reverse=True), 0]
    labels = [f"{one.dp},{one.tp},{one.pp}" for one in best.strategies.strategies]
    read = read_strategies(labels, bounds, world_size=8, seq_length=8192, shape=SHAPE)
    assert read.buckets == best.strategies.buckets


def test_switches_take_the_way_that_moves_fewer_bytes() -> None:
    labels = ["1,8,1", "4,2,1", "2,2,2"]
    home, first, second = (strategy.layout(SHAPE.num_layers) for strategy in read_strategies(labels).strategies)

    def seconds(source: Layout, target: Layout) -> float:
        return measure_plan(plan_switch(SHAPE, source, target)).seconds(MACHINE.links)

    found = suggester().estimate(list(read_strategies(labels).strategies), (8192, 2048, 1024, 0))
    # The second guest holds parts of what the first one does; gradients are twice the bytes of parameters.
    assert seconds(first, second) == 0 < seconds(first, home)
    assert found.switching == pytest.approx(seconds(home, first) + 2 * seconds(second, home))
    # The first guest's gradients wait at the second one.
    listed = found.strategies
    waiting = suggester().times.memory(listed.strategies[2], 2048, listed.home, switches=True, receives=True)
    assert found.memory[2] == waiting


def test_one_strategy_is_kept_where_switching_gains_nothing() -> None:
    best = suggester([8192] * 16).best([2048, 1024])
    assert len(best.strategies.strategies) == 1
    assert best.switching == 0


def test_single_strategies_come_quickest_first_and_fit() -> None:
    found = suggester(memory_gib=6).static()
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert len(found) < len(candidates(suggester().times, 8))
    assert all(held <= 6 * 2**30 for one in found for held in one.memory)


def test_a_context_that_fits_nowhere_is_refused_with_what_it_needs() -> None:
    with pytest.raises(UserError, match=r"sequences of 8192 positions need \d+\.\d GiB per GPU at least"):
        suggester(memory_gib=0.5).static()


def test_a_context_that_only_fits_uncut_is_refused_for_that() -> None:
    with pytest.raises(UserError, match=r"rows of 8191 positions cannot be cut by any tensor-parallel size"):
        suggester(memory_gib=2.6, context=8191).static()


def test_candidates_for_many_ranks_are_found_at_once() -> None:
    assert all(one.pp <= SHAPE.num_layers for one in candidates(suggester().times, 2**40))


def test_home_divides_the_batch() -> None:
    for count, sizes in ((64, {1, 2, 4, 8}), (68, {1, 2, 4})):
        listed = suggester([100] * count, memory_gib=80).static()
        assert {suggestion.strategies.home.dp for suggestion in listed} == sizes
    measured = replace(suggester().times.times, measured={(1, 1): (0.0, 1e-6, 0.0)})
    with pytest.raises(UserError, match=r"--global-batch-size 67 is not a multiple .* give 64 or 72"):
        Suggester(StepTimes(times=measured), gpus=8, lengths=LONG_TAILED[1:], context=8192)


def test_a_guest_without_data_is_not_switched_to() -> None:
    read = read_strategies(["1,8,1", "8,1,1", "2,2,2"]).strategies
    without_short = suggester([100] * 60).on([5000] * 60)
    assert without_short.estimate([read[0], read[1]], (8192, 1024, 0)).moved == 0
    # The other one's switches are those of a list that never had the first.
    both = without_short.on([1500] * 30 + [5000] * 30).estimate(list(read), (8192, 2048, 1024, 0))
    alone = without_short.on([1500] * 30 + [5000] * 30).estimate([read[0], read[2]], (8192, 2048, 0))
    assert 0 < both.switching == alone.switching
    assert both.moved == alone.moved
