# SPDX-License-Identifier: Apache-2.0
"""Means over workers of a stream of buffers: in order, in place, in bounded memory, the same bits however cut."""

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks

LENGTHS = (5, 0, 1, 2, 3, 17, 1000, 64)


def buffers_of(rank):
    """Return the buffers that a rank brings; magnitudes differ, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(length, generator=generator) * 10.0 ** (3 * rank % 7) for length in LENGTHS]


def means(segment):
    """Return the means with segments of `segment` elements, the expected ones, and whether all was in place."""
    from megatron_ext.transport import collectives

    collectives.SEGMENT_NUMEL = segment
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mine = buffers_of(dist.get_rank())
    found = list(collectives.ordered_means(iter(mine), dist.group.WORLD))
    in_place = len(found) == len(mine) and all(left is right for left, right in zip(found, mine, strict=True))
    expected = buffers_of(0)
    for rank in range(1, size):
        for total, other in zip(expected, buffers_of(rank), strict=True):
            total += other
    return [mean.tolist() for mean in found], [(total / size).tolist() for total in expected], in_place


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("segment", [1, 7, 1 << 20])
def test_every_buffer_becomes_the_mean_in_worker_order_however_it_is_cut(workers, segment):
    for found, expected, in_place in run_ranks(means, workers, segment):
        assert found == expected
        assert in_place


def taken_ahead(buffers):
    """Return how many buffers were taken whenever one was finished."""
    from megatron_ext.transport import collectives

    dist.init_process_group("gloo")
    taken = 0

    def stream():
        nonlocal taken
        for _ in range(buffers):
            taken += 1
            yield torch.ones(10)

    return [taken for _ in collectives.ordered_means(stream(), dist.group.WORLD)], collectives.SEGMENTS_IN_FLIGHT


def test_buffers_are_taken_only_when_there_is_room_on_the_way():
    for taken, in_flight in run_ranks(taken_ahead, 2, 30):
        assert len(taken) == 30
        assert all(ahead - finished <= 2 * in_flight + 1 for finished, ahead in enumerate(taken))


def uneven_sum(numel):
    """Return this rank's sum of a length that does not split evenly."""
    from megatron_ext.transport.collectives import start_ordered_sum

    dist.init_process_group("gloo")
    mine = torch.arange(numel, dtype=torch.float32) + dist.get_rank()
    start_ordered_sum(mine, dist.group.WORLD).wait()
    return mine.tolist()


@pytest.mark.parametrize("numel", [0, 1, 2, 7])
def test_a_sum_needs_no_padding(numel):
    expected = [3.0 * index + 3 for index in range(numel)]
    assert run_ranks(uneven_sum, 3, numel) == [expected] * 3
