# SPDX-License-Identifier: Apache-2.0
"""Eager updates: a worker's own share counts at once, the others' one round later, and no worker waits."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.local_sgd import LocalSGDConfig, OuterOptimizerConfig, StreamingConfig
from tests.local_sgd.engines import engine_of, start_groups
from tests.support.distributed import run_ranks

EAGER = {"eager": True}
SIZES = [(30, 70), (7,), (400,)]
UNITS = ["layer.0", "layer.0", "layer.1"]


def moved(values, step):
    for value in values:
        value += torch.randn(value.shape, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def rounds(count, **outer):
    """Return this worker's values before and after every round and at the end, and the bytes it sent in one."""
    values = [torch.zeros(size) for size in SIZES]
    engine = engine_of(values, units=UNITS, streaming=EAGER, **outer)
    engine.take_anchor()
    found, report = [], None
    for step in range(count):
        moved(values, step)
        before = [value.clone() for value in values]
        assert engine.count_step()
        (report,) = engine.advance().reports
        found.append(([value.tolist() for value in before], [value.tolist() for value in values]))
        assert not engine.synced
    engine.finish()
    assert engine.synced
    return found, [value.tolist() for value in values], report.bytes_sent, report.pseudo_gradient_norm


@pytest.mark.parametrize("workers", [2, 3])
def test_a_round_follows_the_algorithm_by_hand(workers):
    lr, momentum = 0.7, 0.9
    results = run_ranks(
        rounds, workers, 3, outer_optimizer_lr=lr, outer_optimizer_momentum=momentum, outer_optimizer_nesterov=False
    )
    squares = 0.0
    for place in range(len(SIZES)):
        anchors = [torch.zeros(SIZES[place], dtype=torch.float64) for _ in range(workers)]
        moments = [torch.zeros_like(anchor) for anchor in anchors]
        late = [torch.zeros_like(anchor) for anchor in anchors]
        for number in range(3):
            thetas = [torch.tensor(found[number][0][place], dtype=torch.float64) for found, *_ in results]
            deltas = [anchor - theta for anchor, theta in zip(anchors, thetas, strict=True)]
            steps = [delta / workers + others for delta, others in zip(deltas, late, strict=True)]
            for worker, gradient in enumerate(steps):
                moments[worker] = momentum * moments[worker] + gradient
                anchors[worker] = anchors[worker] - lr * moments[worker]
                after = torch.tensor(results[worker][0][number][1][place], dtype=torch.float64)
                assert torch.allclose(after, anchors[worker], atol=1e-5)
            late = [sum(deltas) / workers - delta / workers for delta in deltas]
        squares += sum(float(gradient.square().sum()) for gradient in steps) / workers
        end = sum(anchor - others for anchor, others in zip(anchors, late, strict=True)) / workers
        for _, last, *_ in results:
            assert torch.allclose(torch.tensor(last[place], dtype=torch.float64), end, atol=1e-5)
    assert all(last == results[0][1] for _, last, *_ in results)
    assert all(norm == pytest.approx(squares**0.5, rel=1e-5) for *_, norm in results)
    numel = sum(torch.Size(size).numel() for size in SIZES)
    assert sum(sent for *_, sent, _ in results) == 4 * 2 * numel * (workers - 1)  # a ring all-reduce's


def continued(fragments):
    """Return values of a straight run, and for every step of it those of one that was saved and loaded there."""
    groups = start_groups()
    options = {"units": UNITS, "groups": groups, "interval": 4, "streaming": {**EAGER, "fragments": fragments}}

    def run(saved_at):
        values = [torch.zeros(size) for size in SIZES]
        engine = engine_of(values, **options)
        engine.take_anchor()
        for step in range(12):
            moved(values, step)
            if engine.count_step():
                engine.advance()
            if step == saved_at:
                state = (engine.tensor_state(), engine.scalar_state(), engine.worker_state())
                assert not state[0]
                assert set(state[2]) == {"anchor", "momentum_buffer", "late"}
                engine = engine_of(values, **options)
                engine.load(*state)
        apart = [value.tolist() for value in values]
        engine.finish()
        return apart, [value.tolist() for value in values]

    return run(None), [run(step) for step in (2, 3, 4, 5, 6, 7)]


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_saved_state_continues_bit_for_bit_with_messages_in_flight(fragments):
    results = run_ranks(continued, 3, fragments)
    for straight, resumed in results:
        assert all(run == straight for run in resumed)
    ends = [straight for straight, _ in results]
    assert all(end == ends[0][1] for _, end in ends)
    assert ends[0][0] != ends[1][0]


def half_way():
    """Return for each step whether something had to be done after it."""
    values = [torch.zeros(1000)]
    engine = engine_of(values, interval=4, streaming=EAGER)
    engine.take_anchor()
    found = []
    for step in range(8):
        moved(values, step)
        found.append(engine.count_step())
        if found[-1]:
            engine.advance()
    return found


def test_owners_answer_half_an_interval_after_a_round():
    assert run_ranks(half_way, 2) == [[False, True, False, True, False, True, False, True]] * 2


def test_what_cannot_be_combined_is_refused():
    config = LocalSGDConfig(
        use_local_sgd=True, local_sgd_workers=2, local_sgd_sync_interval=4, clip_pseudo_grad=1.0, codec="int8"
    )
    problems = StreamingConfig(eager=True, sync_delay=1).problems(config, OuterOptimizerConfig())
    assert len(problems) == 4
    assert all(problem.startswith("--local-sgd-eager-updates ") for problem in problems)
