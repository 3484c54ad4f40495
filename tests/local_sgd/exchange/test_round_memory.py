# SPDX-License-Identifier: Apache-2.0
"""How the engine lays out a round in memory changes no bit of it."""

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.engines import engine_of
from tests.support.distributed import run_ranks


def trace(values, limit, *, rounds=3, **outer):
    """Return the values after some rounds between two workers, with segments of `limit` elements."""
    from megatron_ext.local_sgd.exchange import fragment as module

    module.SEGMENT_NUMEL = limit
    engine = engine_of(values, **outer)
    engine.take_anchor()
    for _ in range(rounds):
        for value in values:
            value.mul_(1 + 0.01 * (dist.get_rank() + 1))
        engine.sync()
    return engine


def whole_and_in_shards(outer):
    """Return one tensor's values after rounds on the whole of it, and on shards cut at odd places."""
    start = torch.randn(1003, generator=torch.Generator().manual_seed(0))
    whole, shards = start.clone(), [part.clone() for part in start.split([1, 332, 7, 663])]
    trace([whole], 1 << 20, **outer)
    trace(shards, 1 << 20, **outer)
    return whole.tolist(), torch.cat(shards).tolist()


@pytest.mark.parametrize("outer", [{}, {"outer_optimizer": "adamw", "outer_optimizer_lr": 0.1}])
def test_the_outer_step_does_not_depend_on_where_a_shard_is_cut(outer):
    for whole, shards in run_ranks(whole_and_in_shards, 2, outer):
        assert whole == shards


def strided(limit):
    """Return the values of a transposed tensor and of a contiguous copy of it."""
    transposed = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).t()
    copied = transposed.contiguous()
    trace([transposed], limit)
    trace([copied], limit)
    return transposed.tolist(), copied.tolist()


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_a_value_that_is_not_contiguous_is_synchronised_like_any_other(limit):
    for transposed, copied in run_ranks(strided, 2, limit):
        assert transposed == copied


def exchanged_memory(sizes, limit):
    """Return for every buffer of a round whether it lies in the memory of a value."""
    from megatron_ext.local_sgd.exchange import fragment as module
    from megatron_ext.local_sgd.exchange import rounds

    values = [torch.ones(size) for size in sizes]
    module.SMALL_NUMEL = 10
    engine = trace(values, limit, rounds=0)
    found = []
    through_owners = rounds.through_owners

    def spied(buffers, group, combine):
        def spy():
            for buffer in buffers:
                for tensor in buffer:
                    inside = [
                        value.data_ptr() <= tensor.data_ptr() < value.data_ptr() + 4 * value.numel()
                        for value in values
                    ]
                    found.append((tensor.numel(), any(inside)))
                yield buffer

        return through_owners(spy(), group, combine)

    rounds.through_owners = spied
    engine.sync()
    return found


def test_a_value_of_any_size_asks_for_no_buffer_of_its_size():
    # A value of 100 goes in two segments from its own memory, the two of 3 are packed.
    assert run_ranks(exchanged_memory, 2, (100, 3, 3), 53) == [[(53, True), (47, True), (6, False)]] * 2


def held(outer):
    """Return how many elements the engine holds between rounds."""
    engine = trace([torch.ones(1000), torch.ones(24)], 100, **outer)
    shard = engine._fragments[0].state.shard
    owned = [shard.anchors, *(shard.optimizer.states(run) for run in range(len(shard.anchors)))]
    return sum(tensor.numel() for tensors in owned for tensor in tensors)


@pytest.mark.parametrize("workers", [2, 4])
def test_anchor_and_momentum_are_sharded_over_the_workers(workers):
    assert sum(run_ranks(held, workers, {})) == 2 * 1024
    assert sum(run_ranks(held, workers, {"outer_optimizer": "adam", "outer_optimizer_lr": 0.7})) == 3 * 1024
