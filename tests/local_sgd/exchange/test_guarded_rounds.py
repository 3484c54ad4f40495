# SPDX-License-Identifier: Apache-2.0
"""Rounds with the pseudo-gradient penalty and with other reducers, over real processes."""

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.engines import engine_of, moved, pairs, replica_beside_shards, start_groups
from tests.support.distributed import RankFailure, run_ranks

PLAIN = {"outer_optimizer": "none"}


def on_a_mesh(penalty):
    """Return a value after a round of 2 workers of 2 ranks each; worker 0 moved by 1, worker 1 by 3."""
    groups = pairs()
    value = torch.zeros(3)
    engine = engine_of([value], groups=groups, penalty=penalty, **PLAIN)
    engine.take_anchor()
    value += 1.0 + 2.0 * (dist.get_rank() // 2)
    engine.sync()
    return value.tolist()


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ({}, 2.0),
        ({"pseudo_gradnorm_reduce": True}, 1.0148),
        ({"clip_pseudo_grad": 1.0}, 0.4082),
        ({"clip_pseudo_grad": 100.0}, 2.0),
    ],
)
def test_norms_are_taken_over_all_shards_of_a_worker(penalty, expected):
    # Specified golden values of a 2 x 2 mesh.
    for value in run_ranks(on_a_mesh, 4, penalty):
        assert value == pytest.approx([expected] * 3, abs=5e-5)


def after_a_round(progress, penalty, gta, numel=1):
    """Return a value of which worker i moved by progress[i]."""
    value = torch.zeros(numel)
    engine = engine_of([value], penalty=penalty, gta=gta, **PLAIN)
    engine.take_anchor()
    value += progress[dist.get_rank()]
    engine.sync()
    return value.tolist()


@pytest.mark.parametrize("gta", [{}, {"reducer": "linear"}, {"reducer": "gta", "consensus_method": "count"}])
def test_norm_weights_give_the_specified_value_with_every_reducer(gta):
    for value in run_ranks(after_a_round, 2, [1.0, 3.0], {"pseudo_gradnorm_reduce": True}, gta):
        assert value == pytest.approx([1.2384], abs=5e-5)


@pytest.mark.parametrize(
    ("gta", "expected"),
    [
        ({"reducer": "linear"}, 0.5),
        ({"reducer": "gta", "consensus_method": "sum"}, 3.0),
        ({"reducer": "gta", "consensus_method": "sum", "int8_mask": True}, 3.0),
        ({"reducer": "gta", "consensus_method": "count"}, -2.0),
    ],
)
def test_four_workers_reduce_to_the_specified_values(gta, expected):
    # Worker r's pseudo-gradient is (r + 1)(-1)^r, so it moved by the opposite.
    progress = [-(rank + 1.0) * (-1) ** rank for rank in range(4)]
    for value in run_ranks(after_a_round, 4, progress, {}, gta, 4):
        assert value == pytest.approx([expected] * 4)


def test_every_worker_has_a_random_mask_of_its_own():
    """With one for all, half of the elements would be lost to everybody, and no element would come from some."""
    gta = {"reducer": "gta", "sparsification_method": "random", "density": 0.5}
    for value in run_ranks(after_a_round, 3, [1.0] * 3, {}, gta, 1000):
        counts = {step: sum(element == pytest.approx(step) for element in value) for step in (0.0, 1 / 3, 2 / 3, 1.0)}
        assert sum(counts.values()) == 1000
        assert counts[0.0] == pytest.approx(125, abs=50) and counts[1 / 3] == pytest.approx(375, abs=80)


def sparse_rounds(method):
    """Return all values after two rounds in which every worker moved by other random amounts."""
    torch.manual_seed(0)
    values = [torch.randn(500), torch.randn(7), torch.randn(40)]
    gta = {"reducer": "gta", "consensus_method": "sum", "sparsification_method": method, "density": 0.5}
    engine = engine_of(values, gta=gta)
    engine.take_anchor()
    start = [value.clone() for value in values]
    noise = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        for value in values:
            value += torch.randn(value.shape, generator=noise)
        engine.sync()
    moved_elements = sum(int((value != before).sum()) for value, before in zip(values, start, strict=True))
    return [value.tolist() for value in values], moved_elements


@pytest.mark.parametrize("method", ["magnitude", "random", "rescaled_random"])
def test_workers_are_equal_after_a_sparse_round(method):
    # The official reducer leaves every worker with its own value (W5).
    results = run_ranks(sparse_rounds, 3, method)
    assert all(result == results[0] for result in results)
    assert results[0][1] > 300


@pytest.mark.parametrize("method", ["magnitude", "random"])
def test_ranks_of_a_worker_thin_out_their_replicas_alike(method):
    gta = {"reducer": "gta", "sparsification_method": method, "density": 0.3}
    first, *others = run_ranks(replica_beside_shards, 4, gta=gta)
    assert 0 < sum(value != 0 for value in first) < len(first)
    assert all(other == first for other in others)


def one_bad_worker(bad, penalty):
    """Return values, anchors and report after rounds in which worker 1 brings `bad` in one unit of the last."""
    values = [torch.zeros(4), torch.zeros(4)]
    engine = engine_of(values, units=["layer.0", "layer.1"], penalty=penalty, outer_optimizer_momentum=0.9)
    engine.take_anchor()
    for number in range(6):
        for value in values:
            value += 1.0 + 0.01 * (-1) ** number
        engine.sync()
    before = [value.clone() for value in values]
    for value in values:
        value += 1.0
    if dist.get_rank() == 1:
        values[1] += bad - 1.0
    (report,) = engine.sync().reports
    return [value.tolist() for value in values], [value.tolist() for value in before], report.rejected


SKIP = {"skip_anomaly": True, "ewma_warmup_steps": 3, "ewma_alpha": 0.2}


@pytest.mark.parametrize("bad", [50.0, float("nan"), float("inf")])
def test_an_anomalous_worker_is_left_out_of_its_unit_and_dilutes_nothing(bad):
    results = run_ranks(one_bad_worker, 2, bad, SKIP)
    for values, _, rejected in results:
        assert rejected == {"layer.1": [1]}
        # Both units moved alike: the mean over the accepted workers is what worker 0 alone brought.
        assert values[0] == values[1]
    assert results[0] == results[1]


def everybody_bad(bad):
    """Return values before and after a round in which all workers are anomalous, and one after a normal round."""
    value = torch.zeros(4)
    engine = engine_of([value], penalty=SKIP)
    engine.take_anchor()
    for number in range(6):
        value += 1.0 + 0.01 * (-1) ** number
        engine.sync()
    before = value.clone()
    value += bad
    (report,) = engine.sync().reports
    after = value.clone()
    value += 1.0
    engine.sync()
    return before.tolist(), after.tolist(), value.tolist(), report.rejected


@pytest.mark.parametrize("bad", [80.0, float("nan")])
def test_when_all_workers_are_anomalous_the_unit_goes_back_to_its_anchor(bad):
    for before, after, later, rejected in run_ranks(everybody_bad, 2, bad):
        assert rejected == {"layer.0": [0, 1]}
        assert after == before
        # The outer momentum was neither moved nor lost: the next normal round is as if nothing had been.
        assert later[0] > after[0] + 1.0


def three_anomalies():
    """Return which of three anomalies in a row were rejected; the detector has seen 8 normal rounds."""
    value = torch.zeros(4)
    engine = engine_of([value], penalty=SKIP, **PLAIN)
    engine.take_anchor()
    for number in range(8):
        value += 1.0 + 0.01 * (-1) ** number
        engine.sync()
    found = []
    for _ in range(3):
        value += 1.0 + 499.0 * dist.get_rank()
        found.append(engine.sync().reports[0].rejected)
    return found


def test_an_anomaly_does_not_make_the_next_one_look_normal():
    # The official detector learns from what it rejected (W3).
    assert run_ranks(three_anomalies, 2) == [[{"layer.0": [1]}] * 3] * 2


def copies_and_replicas(penalty):
    """Return a tensor that is kept twice at different offsets, after guarded rounds with three workers."""
    torch.manual_seed(0)
    shared = torch.randn(1003)
    values = [torch.randn(7), shared.clone(), torch.randn(300), shared.clone()]
    engine = engine_of(values, units=["layer.0", "embedding", "layer.0", "embedding"], penalty=penalty)
    engine.take_anchor()
    noise = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        step = torch.randn(1003, generator=noise)
        for value in values:
            value += step[: value.numel()]
        engine.sync()
    return [value.tolist() for value in values]


@pytest.mark.parametrize("workers", [2, 3])
def test_copies_of_a_tensor_stay_equal_bit_for_bit_under_the_penalty(workers):
    penalty = {**SKIP, "pseudo_gradnorm_reduce": True, "clip_pseudo_grad": 1.0}
    results = run_ranks(copies_and_replicas, workers, penalty)
    assert results[0][1] == results[0][3]
    assert all(result == results[0] for result in results)


def continued(penalty, gta):
    """Return values of a straight run and of one whose state was saved and loaded after every round."""
    start = [torch.zeros(50), torch.ones(20)]
    straight, values, state = [value.clone() for value in start], [value.clone() for value in start], None
    groups = start_groups()
    options = {"units": ["layer.0", "layer.1"], "groups": groups, "penalty": penalty, "gta": gta}
    engine = engine_of(straight, **options)
    engine.take_anchor()
    for number in range(7):
        step = 1.0 + 0.1 * (-1) ** number + (30.0 if number == 5 else 0.0)
        moved(straight, step)
        engine.sync()
        other = engine_of(values, **options)
        if state is None:
            other.take_anchor()
        else:
            other.load(*state)
        moved(values, step)
        (report,) = other.sync().reports
        state = (other.tensor_state(), other.scalar_state())
        if number == 5:
            rejected = report.rejected
    return [value.tolist() for value in straight], [value.tolist() for value in values], rejected


@pytest.mark.parametrize(
    "gta", [{}, {"reducer": "gta", "sparsification_method": "random", "density": 0.5}], ids=["mean", "sparse"]
)
def test_a_saved_state_continues_bit_for_bit_with_its_detector(gta):
    for straight, other, rejected in run_ranks(continued, 2, {**SKIP, "pseudo_gradnorm_reduce": True}, gta):
        assert straight == other
        assert rejected == {"layer.0": [0, 1], "layer.1": [0, 1]}


def resumed_with_another_window():
    """Load a detector's state with another length of its window."""
    groups = start_groups()
    value = torch.zeros(4)
    engine = engine_of([value], groups=groups, penalty=SKIP)
    engine.take_anchor()
    state = engine.tensor_state(), engine.scalar_state()
    engine_of([value], groups=groups, penalty={**SKIP, "ewma_warmup_steps": 9}).load(*state)


def test_another_detector_is_refused_by_the_name_of_its_flag():
    with pytest.raises(RankFailure, match="--local-sgd-ewma-warmup-steps"):
        run_ranks(resumed_with_another_window, 2)
