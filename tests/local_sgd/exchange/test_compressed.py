# SPDX-License-Identifier: Apache-2.0
"""Rounds with a codec, over real processes: equal workers, few bytes, nothing lost for good."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.outer.codecs.all_codecs import lossy_codecs, takes_density
from tests.local_sgd.engines import engine_of, replica_beside_shards, start_groups
from tests.support.distributed import RankFailure, run_ranks

SIZES = [(30, 700), (7,), (40_000,), (64,)]
UNITS = ["layer.0", "layer.0", "layer.1", "layer.1"]
GUARD = {"skip_anomaly": True, "ewma_warmup_steps": 2, "pseudo_gradnorm_reduce": True, "clip_pseudo_grad": 100.0}


def start_values():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in SIZES]


def noise():
    return torch.Generator().manual_seed(100 + dist.get_rank())


def move(values, generator):
    """Move every worker by other random amounts."""
    for value in values:
        value += torch.randn(value.shape, generator=generator)


def values_after_rounds(penalty):
    """Return every rank's values after three rounds in which every worker moved by other random amounts."""
    values = start_values()
    engine = engine_of(values, units=UNITS, penalty=penalty)
    engine.take_anchor()
    generator = noise()
    for _ in range(3):
        move(values, generator)
        engine.sync()
    moved = [float((value - start).norm()) for value, start in zip(values, start_values(), strict=True)]
    return [value.tolist() for value in values], moved


@pytest.mark.parametrize("codec", lossy_codecs())
@pytest.mark.parametrize("guard", [{}, GUARD], ids=["plain", "guarded"])
def test_all_workers_decode_to_equal_bits(codec, guard):
    results = run_ranks(values_after_rounds, 3, {"codec": codec, **guard})
    assert all(values == results[0][0] for values, _ in results)
    assert all(distance > 0 for distance in results[0][1])


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_ranks_of_a_worker_decode_their_replicas_alike(codec):
    first, *others = run_ranks(replica_beside_shards, 4, penalty={"codec": codec})
    assert any(first)
    assert all(other == first for other in others)


def distance_to_the_optimum(codec):
    """Return how far from the common optimum workers end whose own optima lie on different sides of it."""
    groups = start_groups()
    values = [torch.zeros(3000)]
    targets = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    own = targets + torch.randn(3000, generator=noise()) / 2
    mean = own.clone()
    # What is kept back of most values acts like momentum.
    sparse = takes_density(codec)
    outer = {"outer_optimizer_lr": 0.5, "outer_optimizer_momentum": 0.0 if sparse else 0.5}
    engine = engine_of(values, groups=groups, penalty={"codec": codec}, **outer)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    engine.take_anchor()
    for _ in range(600 if sparse else 40):
        for _ in range(4):
            values[0] -= (0.005 if sparse else 0.05) * (values[0] - own)
        engine.sync()
    return float((values[0] - mean).norm() / mean.norm())


@pytest.mark.parametrize("codec", lossy_codecs())
def test_what_messages_lose_arrives_later(codec):
    assert max(run_ranks(distance_to_the_optimum, 2, codec)) < 0.02


def values_with_an_anchor_that_is_moved(codec, moved):
    """Return values after rounds, of which each but the last may be followed by moving the anchor to where it is."""
    values = start_values()
    engine = engine_of(values, units=UNITS, penalty={"codec": codec})
    engine.take_anchor()
    generator = noise()
    for number in range(4):
        move(values, generator)
        engine.sync()
        if moved and number < 3:
            engine.move_anchor()
    return [value.tolist() for value in values]


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_continuing_from_where_all_are_keeps_the_residuals(codec):
    straight = run_ranks(values_with_an_anchor_that_is_moved, 2, codec, False)
    assert run_ranks(values_with_an_anchor_that_is_moved, 2, codec, True) == straight


def bytes_of_a_round(codec):
    """Return the bytes that this rank gave to sends in a round, and what the report says of it."""
    from megatron_ext.patching import PatchRegistry
    from megatron_ext.transport.traffic import TrafficMeter

    values = [torch.zeros(200_000), torch.zeros(100)]
    engine = engine_of(values, penalty={"codec": codec})
    engine.take_anchor()
    values[0] += torch.randn(200_000, generator=noise())
    meter = TrafficMeter(worker_of=range(dist.get_world_size()))
    PatchRegistry().apply(meter.patches())
    (report,) = engine.sync().reports
    return meter.crossing["isend"].bytes, report.bytes_sent, sum(value.numel() for value in values)


@pytest.mark.parametrize(
    ("codec", "goal"),
    [
        *((None, 1.0), ("bf16", 0.53), ("fp8", 0.28), ("int8", 0.28), ("int4", 0.15)),
        *(("topk", 0.08), ("topk2", 0.035)),
    ],
)
def test_what_travels_is_as_small_as_promised(codec, goal):
    results = run_ranks(bytes_of_a_round, 4, codec)
    for sent, reported, numel in results:
        assert sent == reported
        ring = 2 * 3 / 4 * 4 * numel
        assert sent <= goal * ring * 1.001


def continued(codec):
    """Return values of a straight run and of one whose state was saved and loaded after every round."""
    straight, values, state = start_values(), start_values(), None
    groups = start_groups()
    options = {"units": UNITS, "groups": groups, "penalty": {"codec": codec}}
    engine = engine_of(straight, **options)
    engine.take_anchor()
    steps, same_steps = noise(), noise()
    for _ in range(4):
        for value in straight:
            value += torch.randn(value.shape, generator=steps)
        engine.sync()
        other = engine_of(values, **options)
        if state is None:
            other.take_anchor()
        else:
            other.load(*state)
        for value in values:
            value += torch.randn(value.shape, generator=same_steps)
        other.sync()
        state = (other.tensor_state(), other.scalar_state(), other.worker_state())
    return [value.tolist() for value in straight], [value.tolist() for value in values]


@pytest.mark.parametrize("codec", ["bf16", "int4", "topk", "topk2"])
def test_a_saved_state_continues_bit_for_bit_with_its_residuals(codec):
    for straight, other in run_ranks(continued, 2, codec):
        assert straight == other


def non_finite_once(codec, penalty):
    """Return whether values are finite after a round in which worker 1 was non-finite, and after the next one."""
    values = [torch.zeros(5000)]
    engine = engine_of(values, penalty={"codec": codec, **penalty})
    engine.take_anchor()
    found = []
    for number in range(5):
        values[0] += torch.randn(5000, generator=noise())
        if number == 3 and dist.get_rank() == 1:
            values[0][17] = float("nan")
        (report,) = engine.sync().reports
        found.append((bool(torch.isfinite(values[0]).all()), report.rejected))
    return found


@pytest.mark.parametrize("codec", ["bf16", "int4", "topk"])
def test_a_non_finite_worker_is_left_out_once_and_heals(codec):
    for found in run_ranks(non_finite_once, 2, codec, {"skip_anomaly": True, "ewma_threshold": 1e6}):
        assert [finite for finite, _ in found] == [True] * 5
        assert [rejected for _, rejected in found] == [{}, {}, {}, {"layer.0": [1]}, {}]


def test_a_non_finite_worker_ends_the_run_by_its_number():
    with pytest.raises(RankFailure, match="worker 1 had non-finite weights"):
        run_ranks(non_finite_once, 2, "int8", {})
