# SPDX-License-Identifier: Apache-2.0
"""Sums over workers do not depend on where a value lies, and the meter counts what really crosses."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.transport.collectives import part_bounds
from tests.support.distributed import run_ranks
from tests.support.every_run import one_of_each


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_parts_cover_a_buffer_and_differ_by_at_most_one(numel, workers):
    bounds = part_bounds(numel, workers)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    assert len(lengths) == workers
    assert sum(lengths) == bounds[-1] == numel
    assert max(lengths) - min(lengths) <= 1


def ordered_sum(numel, segment):
    """Return this rank's sum and what adding the workers in order gives."""
    from megatron_ext.transport import collectives

    collectives.SEGMENT_NUMEL = segment
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    buffers = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    expected = buffers[0].clone()
    for buffer in buffers[1:]:
        expected += buffer
    mine = buffers[dist.get_rank()]
    collectives.ordered_sum(mine, dist.group.WORLD)
    return mine.tolist(), expected.tolist()


@pytest.mark.parametrize("workers", one_of_each([1, 2, 3, 4], {0, 2}))
@pytest.mark.parametrize(("numel", "segment"), [(61, 1), (61, 7), (61, 1 << 20), (200_003, 1 << 20)])
def test_the_sum_adds_workers_in_order_for_every_element(workers, numel, segment):
    for mine, expected in run_ranks(ordered_sum, workers, numel, segment):
        assert mine == expected


def counted():
    """Return what the meter and torch's own dispatcher saw of the same collectives."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron_ext.patching import PatchRegistry
    from megatron_ext.transport.traffic import TrafficMeter

    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, other = pairs[dist.get_rank() // 2], across[dist.get_rank() % 2]
    meter = TrafficMeter(worker_of=[0, 0, 1, 1])
    registry = PatchRegistry()
    registry.apply(meter.patches())
    seen = []

    class Dispatcher(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "c10d" in str(function):
                seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Dispatcher():
        dist.all_reduce(torch.ones(10), group=mine)
        dist.all_reduce(torch.ones(10), group=other)
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=other)
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8), group=mine)
        dist.barrier()
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), dst=2)
        if dist.get_rank() == 2:
            dist.recv(torch.ones(3), src=0)
    registry.revert()
    counts = {name: (traffic.calls, traffic.bytes) for name, traffic in meter.crossing.items()}
    inside = {name: (traffic.calls, traffic.bytes) for name, traffic in meter.inside.items()}
    return counts, inside, len(seen)


def test_the_meter_sees_what_the_dispatcher_sees_and_tells_workers_apart():
    results = run_ranks(counted, 4)
    crossing, inside, dispatched = results[1]
    assert crossing == {"all_reduce": (1, 40), "all_gather_into_tensor": (1, 32), "barrier": (1, 0)}
    assert inside == {"all_reduce": (1, 40), "reduce_scatter_tensor": (1, 32)}
    assert dispatched == 5
    assert results[0][0]["send"] == (1, 12)
