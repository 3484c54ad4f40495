# SPDX-License-Identifier: Apache-2.0
"""Rounds of random pairs: each worker meets one other, and all are drawn together."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, OuterOptimizerConfig, StreamingConfig
from megatron_ext.local_sgd.combinations import method_problems
from megatron_ext.local_sgd.exchange.pairwise import partners
from megatron_ext.outer.places import Where
from tests.local_sgd.engines import engine_of, start_groups
from tests.support.distributed import run_ranks

PAIRS = {"reducer": "pairwise"}
SIZES = [(30, 70), (7,), (400,)]
UNITS = ["layer.0", "layer.0", "layer.1"]


@given(st.integers(1, 1000), st.integers(1, 33))
def test_everybody_has_one_partner_who_has_them(number, workers):
    found = partners(number, workers)
    assert [found[partner] for partner in found] == list(range(workers))
    assert sum(found[worker] == worker for worker in range(workers)) == workers % 2


def test_partners_change_from_round_to_round():
    assert len({tuple(partners(number, 4)) for number in range(1, 30)}) == 3


def stepped(values, step):
    for value in values:
        value += torch.randn(value.shape, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def rounds(count, **outer):
    """Return this worker's values before and after every round, and the bytes it sent in one."""
    values = [torch.zeros(size) for size in SIZES]
    engine = engine_of(values, units=UNITS, gta=PAIRS, **outer)
    engine.take_anchor()
    found, sent = [], 0
    for step in range(count):
        stepped(values, step)
        before = [value.clone() for value in values]
        assert engine.count_step()
        (report,) = engine.advance().reports
        sent = report.bytes_sent
        found.append(([value.tolist() for value in before], [value.tolist() for value in values]))
        assert not engine.synced
    engine.finish()
    assert engine.synced
    return found, [value.tolist() for value in values], sent


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_round_follows_the_algorithm_by_hand(workers):
    lr, momentum = 0.7, 0.9
    results = run_ranks(
        rounds, workers, 3, outer_optimizer_lr=lr, outer_optimizer_momentum=momentum, outer_optimizer_nesterov=False
    )
    for place in range(len(SIZES)):
        anchors = [torch.zeros(SIZES[place], dtype=torch.float64) for _ in range(workers)]
        moments = [torch.zeros_like(anchor) for anchor in anchors]
        for number in (1, 2, 3):
            pairs = partners(number, workers)
            thetas = [torch.tensor(found[number - 1][0][place], dtype=torch.float64) for found, _, _ in results]
            for worker in range(workers):
                gradient = anchors[worker] - (thetas[worker] + thetas[pairs[worker]]) / 2
                moments[worker] = momentum * moments[worker] + gradient
                anchors[worker] = anchors[worker] - lr * moments[worker]
                after = torch.tensor(results[worker][0][number - 1][1][place], dtype=torch.float64)
                assert torch.allclose(after, anchors[worker], atol=1e-5)
    sent = {sent for _, _, sent in results}
    assert sent == {4 * sum(torch.Size(size).numel() for size in SIZES)}
    assert all(end == results[0][1] for _, end, _ in results)


def spread(count):
    """Return how far the workers are apart after rounds without steps in between, relative to the beginning."""
    values = [torch.zeros(500)]
    engine = engine_of(values, gta=PAIRS, outer_optimizer_momentum=0.0, outer_optimizer_lr=1.0)
    engine.take_anchor()
    stepped(values, 0)

    def apart():
        every = [torch.empty_like(values[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(every, values[0])
        return float((torch.stack(every) - torch.stack(every).mean(0)).norm())

    before = apart()
    for _ in range(count):
        engine.sync()
    return apart() / before


def test_workers_are_drawn_together():
    assert max(run_ranks(spread, 4, 12)) < 1e-3


def continued():
    """Return values of a straight run and of one that was saved and loaded after every round."""
    groups = start_groups()
    options = {"units": UNITS, "groups": groups, "gta": PAIRS}
    straight, values = [torch.zeros(size) for size in SIZES], [torch.zeros(size) for size in SIZES]
    engine, other = engine_of(straight, **options), engine_of(values, **options)
    engine.take_anchor()
    other.take_anchor()
    for step in range(4):
        stepped(straight, step)
        engine.sync()
        stepped(values, step)
        other.sync()
        state = other.tensor_state(), other.scalar_state(), other.worker_state()
        other = engine_of(values, **options)
        other.load(*state)
    assert set(state[2]) == {"anchor", "momentum_buffer"}
    return [value.tolist() for value in straight], [value.tolist() for value in values]


def test_a_saved_state_continues_bit_for_bit():
    for straight, other in run_ranks(continued, 3):
        assert straight == other


def test_what_cannot_be_combined_is_refused():
    config = LocalSGDConfig(
        use_local_sgd=True, local_sgd_workers=2, clip_pseudo_grad=1.0, codec="int8", local_sgd_evaluation="workers"
    )
    gta = GTAConfig(reducer="pairwise")
    problems = method_problems(config, OuterOptimizerConfig(), gta, StreamingConfig(), Where.JOB)
    assert len(problems) == 2
    assert all(problem.startswith("--local-sgd-pseudo-grad-reducer pairwise") for problem in problems)
