# SPDX-License-Identifier: Apache-2.0
"""How the engine lays out a round in memory changes no bit of it."""

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.engines import engine_of
from tests.support.distributed import run_ranks


def trace(values, limit, *, rounds=3, **outer):
    """Return the values after some rounds between two workers, with buckets of `limit` elements."""
    from megatron_ext.local_sgd import engine as module

    module.BUCKET_NUMEL = limit
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


def where_it_is_collected():
    """Return whether a large value and a small one are collected into their own memory."""
    large, small, smaller = torch.ones(100), torch.ones(3), torch.ones(3)
    engine = trace([large, small, smaller], 50, rounds=0)
    found = {}
    for bucket in engine._buckets:
        buffer = engine._collect(bucket)
        found[tuple(bucket)] = buffer.data_ptr() in [engine.values[index].data_ptr() for index in bucket]
    return found


def test_a_value_of_any_size_asks_for_no_buffer_of_its_size():
    assert run_ranks(where_it_is_collected, 2) == [{(0,): True, (1, 2): False}] * 2
