# SPDX-License-Identifier: Apache-2.0
"""The engine on plain tensors over gloo: golden values, order-independence, the guard, its state."""

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.engines import engine_of, moved, start_groups
from tests.support.distributed import RankFailure, run_ranks


def diloco_trace(outer, progress_by_worker, rounds):
    """Return the synced value after each round when worker i moves by progress[i] per interval."""
    torch.set_num_threads(1)
    value = torch.full((3,), 0.5)
    engine = engine_of([value], **outer)
    engine.take_anchor()
    trace = []
    for _ in range(rounds):
        value += progress_by_worker[dist.get_rank()]
        engine.sync()
        trace.append(float(value[0]))
    return trace


def test_one_worker_steps_by_itself_as_several_step_by_their_mean():
    nesterov = {"outer_optimizer_momentum": 0.8}
    ((alone), several) = (run_ranks(diloco_trace, len(each), nesterov, each, 2)[0] for each in ([2.0], [1.0, 3.0]))
    assert alone == several


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        # lr .7, momentum .8, Nesterov, mean progress 2 per interval: specified golden values.
        ({"outer_optimizer_momentum": 0.8}, [3.02, 6.436]),
        ({"outer_optimizer_momentum": 0.8, "outer_optimizer_nesterov": False}, [1.9, 4.42]),
        ({"outer_optimizer_lr": 1.0, "outer_optimizer_momentum": 0.0}, [2.5, 4.5]),
        ({"outer_optimizer": "none"}, [2.5, 4.5]),
        (
            {"outer_optimizer_lr_schedule": "1:0.5,2:1", "outer_optimizer_momentum_schedule": "1:0"},
            [1.5, 3.5],
        ),
    ],
)
def test_rounds_follow_the_golden_values(outer, expected):
    traces = run_ranks(diloco_trace, 2, outer, [1.0, 3.0], 2)
    assert traces[0] == traces[1] == pytest.approx(expected, rel=1e-6)


def offsets_trace():
    """Return the bits of one tensor kept twice, at two offsets of the exchanged buffer, after some rounds."""
    torch.manual_seed(0)
    shared = torch.randn(1000)
    values = [torch.randn(7), shared.clone(), torch.randn(13), shared.clone()]
    engine = engine_of(values)
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
    results = run_ranks(offsets_trace, workers)
    assert results[0][1] == results[0][3]
    assert all(result == results[0] for result in results)


def cut_differently():
    """Return one tensor kept whole and kept in two parts, after rounds with momentum."""
    torch.manual_seed(0)
    whole = torch.randn(1003)
    values = [whole, whole[:3].clone(), whole[3:].clone()]
    engine = engine_of(values)
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


def small_segments(limit, small):
    """Return the values after one round with segments of `limit` elements."""
    from megatron_ext.local_sgd.exchange import fragment as module

    module.SEGMENT_NUMEL, module.SMALL_NUMEL = limit, small
    torch.manual_seed(0)
    values = [torch.randn(size) for size in (5, 1, 17, 0, 4, 320, 3)]
    engine = engine_of(values)
    engine.take_anchor()
    moved(values, 1)
    engine.sync()
    return [value.tolist() for value in values]


@pytest.mark.parametrize("workers", [2, 3])
def test_the_segment_size_changes_no_bit(workers):
    cuts = [(1, 0), (7, 10), (100, 5), (1 << 20, 0), (1 << 20, 1 << 14)]
    results = [run_ranks(small_segments, workers, limit, small)[0] for limit, small in cuts]
    assert all(result == results[0] for result in results)


def sync_with_a_bad_worker(bad):
    """Bring a non-finite value from worker 1; return the error."""
    values = [torch.ones(8), torch.ones(8), torch.ones(8)]
    engine = engine_of(values, units=["embedding", "layer.0", "layer.1"])
    engine.take_anchor()
    moved(values, 1)
    if dist.get_rank() == 1:
        values[1][3] = bad
    try:
        engine.sync()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_is_non_finite_ends_the_run_on_all_workers_and_is_named(workers, bad):
    for message in run_ranks(sync_with_a_bad_worker, workers, bad):
        assert "outer round 1: worker 1 had non-finite weights in layer.0. The run ends here" in message


def anchor_of_unequal_workers():
    """Take the anchor where the workers differ in one bit."""
    values = [torch.ones(10), torch.ones(1000)]
    engine = engine_of(values)
    if dist.get_rank() == 1:
        values[1][777] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    engine.take_anchor()


def test_unequal_workers_are_refused_where_the_anchor_is_taken():
    with pytest.raises(RankFailure, match=r"weights differ where the anchor .* first in layer\.0\.tensor\.1;"):
        run_ranks(anchor_of_unequal_workers, 2)


def saved_and_continued(outer):
    """Return values of a straight run and of one whose state went through save and load after every round."""

    def start():
        torch.manual_seed(1)
        return [torch.randn(6), torch.randn(4)]

    straight, groups = start(), start_groups()
    engine = engine_of(straight, interval=2, groups=groups, **outer)
    engine.take_anchor()
    for number in range(3):
        moved(straight, 0.1 * (number + 1))
        engine.sync()

    values, state = start(), None
    for number in range(3):
        other = engine_of(values, interval=2, groups=groups, **outer)
        if state is None:
            other.take_anchor()
        else:
            other.load(*state)
        moved(values, 0.1 * (number + 1))
        other.sync()
        tensors = {
            name: [tensor.clone() for tensor in tensors] for name, tensors in other.tensor_state().items()
        }
        state = (tensors, other.scalar_state())
    return [value.tolist() for value in straight], [value.tolist() for value in values], other.rounds


@pytest.mark.parametrize(
    "outer",
    [
        {},
        {"outer_optimizer": "adamw", "outer_optimizer_lr": 0.1},
        {"outer_optimizer": "none"},
        {"outer_optimizer_lr_schedule": "1:0.1,3:0.9", "outer_optimizer_momentum_schedule": "1:0,3:0.8"},
    ],
    ids=["sgd", "adamw", "none", "schedules"],
)
def test_a_saved_state_continues_bit_for_bit(outer):
    for straight, continued, rounds in run_ranks(saved_and_continued, 2, outer):
        assert straight == continued
        assert rounds == 3


def scheduled_rounds(fragments):
    """Return the anchor's way in every round, per fragment, where every worker moves by 1 each time."""
    values = [torch.zeros(3), torch.zeros(3)]
    streaming = {"fragments": fragments}
    engine = engine_of(
        values,
        interval=2,
        units=["layer.0", "layer.1"],
        streaming=streaming,
        outer_optimizer_lr_schedule="1:0.25,3:0.75",
        outer_optimizer_momentum_schedule="1:0",
    )
    engine.take_anchor()
    reports = []
    for _ in range(8):
        moved(values, 1.0)
        if engine.count_step():
            reports += engine.advance().reports
    return [(report.fragment, report.outer_options["lr"]) for report in reports]


@pytest.mark.parametrize("fragments", [1, 2])
def test_every_fragment_is_at_the_same_place_of_a_schedule_in_an_interval(fragments):
    rates = [0.25, 0.5, 0.75, 0.75]
    for found in run_ranks(scheduled_rounds, 2, fragments):
        for fragment in range(fragments):
            assert [rate for index, rate in found if index == fragment] == rates


def norms_of_a_round():
    """Return the report of a round in which worker i moved each unit by a known amount."""
    values = [torch.zeros(4), torch.zeros(9), torch.zeros(16)]
    engine = engine_of(values, units=["embedding", "layer.0", "layer.0"])
    engine.take_anchor()
    for scale, value in zip((1.0, 2.0, 3.0), values, strict=True):
        value += scale * (dist.get_rank() + 1)
    return engine.sync().reports[0]


def test_a_round_reports_the_norm_of_the_mean_pseudo_gradient_per_unit():
    for report in run_ranks(norms_of_a_round, 2):
        # Mean progress 1.5, 3 and 4.5 per element.
        assert report.unit_norms == pytest.approx({"embedding": 3.0, "layer.0": (9 * 9 + 16 * 20.25) ** 0.5})
        assert report.pseudo_gradient_norm == pytest.approx((9 + 81 + 324) ** 0.5)


def worker_norms_and_bytes():
    """Return the report of a round, and the bytes that this rank really gave to sends."""
    values = [torch.zeros(1000), torch.zeros(25)]
    engine = engine_of(values, units=["embedding", "layer.0"])
    engine.take_anchor()
    moved(values, 1.0)
    sent = []
    original = dist.P2POp

    class Recorded(original):
        def __init__(self, op, tensor, *args, **kwargs):
            super().__init__(op, tensor, *args, **kwargs)
            if op is dist.isend:
                sent.append(tensor.numel() * tensor.element_size())

    dist.P2POp = Recorded
    (report,) = engine.sync().reports
    return report, sum(sent)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_round_reports_each_worker_s_norm_and_the_bytes_it_sent(workers):
    results = run_ranks(worker_norms_and_bytes, workers)
    for report, sent in results:
        assert report.worker_norms == pytest.approx([1025**0.5 * (worker + 1) for worker in range(workers)])
        assert report.bytes_sent == sent
    # The traffic of a ring all-reduce: 2 (W - 1) / W of the bytes, per rank.
    assert sum(sent for _, sent in results) == 2 * (workers - 1) * 4 * 1025
