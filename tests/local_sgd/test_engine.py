# SPDX-License-Identifier: Apache-2.0
"""The engine on plain tensors over gloo: golden values, order-independence, the guard, its state."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.local_sgd import LocalSGDConfig, OuterOptimizerConfig
from tests.support.distributed import RankFailure, run_ranks


def engine_of(values, workers, interval=1, **outer):
    """Return an engine on this rank alone in its worker."""
    from megatron_ext.local_sgd.engine import LocalSGD

    dist.init_process_group("gloo")
    own = [dist.new_group([rank]) for rank in range(workers)][dist.get_rank()]
    return LocalSGD(
        values,
        [True] * len(values),
        config=LocalSGDConfig(
            use_local_sgd=True, local_sgd_workers=workers, local_sgd_sync_interval=interval
        ),
        outer=OuterOptimizerConfig(**outer),
        across=dist.group.WORLD,
        inside=own,
    )


def diloco_trace(outer, progress_by_worker, rounds):
    """Return the synced value after each round when worker i moves by progress[i] per interval."""
    torch.set_num_threads(1)
    value = torch.full((3,), 0.5)
    engine = engine_of([value], len(progress_by_worker), **outer)
    engine.take_anchor()
    trace = []
    for _ in range(rounds):
        value += progress_by_worker[dist.get_rank()]
        engine.sync()
        trace.append(float(value[0]))
    return trace


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        # lr .7, momentum .8, Nesterov, mean progress 2 per interval: specified golden values.
        ({"outer_optimizer_momentum": 0.8}, [3.02, 6.436]),
        ({"outer_optimizer_momentum": 0.8, "outer_optimizer_nesterov": False}, [1.9, 4.42]),
        ({"outer_optimizer_lr": 1.0, "outer_optimizer_momentum": 0.0}, [2.5, 4.5]),
        ({"outer_optimizer": "none"}, [2.5, 4.5]),
    ],
)
def test_rounds_follow_the_golden_values(outer, expected):
    traces = run_ranks(diloco_trace, 2, outer, [1.0, 3.0], 2)
    assert traces[0] == traces[1] == pytest.approx(expected, rel=1e-6)


def offsets_trace(workers):
    """Return the bits of one tensor kept twice, at two offsets of the exchanged buffer, after some rounds."""
    torch.manual_seed(0)
    shared = torch.randn(1000)
    values = [torch.randn(7), shared.clone(), torch.randn(13), shared.clone()]
    engine = engine_of(values, workers)
    engine.take_anchor()
    noise = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        step = torch.randn(1000, generator=noise)
        for value in values:
            value += step[: value.numel()]
        engine.sync()
    return [value.tolist() for value in values]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_copies_at_different_offsets_stay_equal_bit_for_bit(workers):
    results = run_ranks(offsets_trace, workers, workers)
    assert results[0][1] == results[0][3]
    assert all(result == results[0] for result in results)


def cut_differently():
    """Return one tensor kept whole and kept in two parts, after rounds with momentum."""
    torch.manual_seed(0)
    whole = torch.randn(1003)
    values = [whole, whole[:3].clone(), whole[3:].clone()]
    engine = engine_of(values, 2)
    engine.take_anchor()
    noise = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        step = torch.randn(1003, generator=noise)
        for value, part in zip(values, (step, step[:3], step[3:]), strict=True):
            value += part
        engine.sync()
    return values[0].tolist(), torch.cat(values[1:]).tolist()


def test_parts_of_one_tensor_that_are_cut_differently_stay_equal_bit_for_bit():
    for whole, parts in run_ranks(cut_differently, 2):
        assert whole == parts


def small_buckets(workers, limit):
    """Return the values after one round with buckets of `limit` elements."""
    from megatron_ext.local_sgd import engine as module

    module.BUCKET_NUMEL = limit
    torch.manual_seed(0)
    values = [torch.randn(size) for size in (5, 1, 17, 0, 4, 32, 3)]
    engine = engine_of(values, workers)
    engine.take_anchor()
    for value in values:
        value += dist.get_rank() + 1
    engine.sync()
    return [value.tolist() for value in values]


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bucket_size_changes_no_bit(workers):
    results = [run_ranks(small_buckets, workers, workers, limit)[0] for limit in (1, 7, 1 << 20)]
    assert results[0] == results[1] == results[2]


def sync_with_a_bad_worker(bad):
    """Bring a value that is not finite from worker 1; return the error, the anchor and the value of worker 0."""
    value = torch.ones(8)
    engine = engine_of([value], 2)
    engine.take_anchor()
    value += 1
    if dist.get_rank() == 1:
        value[3] = bad
    try:
        engine.sync()
    except RuntimeError as error:
        return str(error), engine.anchors[0].tolist(), value.tolist()
    return None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_worker_that_is_not_finite_stops_the_round_before_anything_is_applied(bad):
    for message, anchor, _ in (results := run_ranks(sync_with_a_bad_worker, 2, bad)):
        assert "worker 1 has weights that are not finite" in message
        assert anchor == [1.0] * 8
    assert results[0][2] == [2.0] * 8


def anchor_of_unequal_workers():
    """Take the anchor where the workers differ in one bit."""
    value = torch.ones(1000)
    if dist.is_initialized():
        dist.destroy_process_group()
    engine = engine_of([value], 2)
    if dist.get_rank() == 1:
        value[777] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    engine.take_anchor()


def test_unequal_workers_are_refused_where_the_anchor_is_taken():
    with pytest.raises(RankFailure, match="weights differ where the anchor"):
        run_ranks(anchor_of_unequal_workers, 2)


def saved_and_continued(outer):
    """Return values of a straight run and of one whose state went through save and load after every round."""

    def start():
        torch.manual_seed(1)
        return [torch.randn(6), torch.randn(4)]

    def interval(values, number):
        for value in values:
            value += 0.1 * (dist.get_rank() + 1) * (number + 1)

    straight = start()
    engine = engine_of(straight, 2, interval=2, **outer)
    engine.take_anchor()
    config, groups = engine.config, (engine.across, engine.inside)
    for number in range(3):
        interval(straight, number)
        engine.sync()

    from megatron_ext.local_sgd.engine import LocalSGD

    values, state = start(), None
    for number in range(3):
        other = LocalSGD(
            values, [True, True], config=config, outer=engine.outer, across=groups[0], inside=groups[1]
        )
        if state is None:
            other.take_anchor()
        else:
            other.load(*state)
        interval(values, number)
        other.sync()
        tensors = {
            name: [tensor.clone() for tensor in tensors] for name, tensors in other.tensor_state().items()
        }
        state = (tensors, other.scalar_state())
    return [value.tolist() for value in straight], [value.tolist() for value in values], other.rounds


@pytest.mark.parametrize(
    "outer", [{}, {"outer_optimizer": "adamw", "outer_optimizer_lr": 0.1}, {"outer_optimizer": "none"}]
)
def test_a_saved_state_continues_bit_for_bit(outer):
    for straight, continued, rounds in run_ranks(saved_and_continued, 2, outer):
        assert straight == continued
        assert rounds == 3
