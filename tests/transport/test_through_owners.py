# SPDX-License-Identifier: Apache-2.0
"""A stream of buffers through the owners of their parts: in order, in place, in bounded memory."""

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks

# The tensors that each buffer consists of.
LENGTHS = ((5,), (0,), (1,), (2,), (1, 2), (17, 0, 3, 40), (1000,), (64, 1, 1, 900), ())


def buffers_of(rank):
    """Return the buffers that a rank brings."""
    generator = torch.Generator().manual_seed(rank)
    return [tuple(torch.randn(length, generator=generator) for length in lengths) for lengths in LENGTHS]


def joined(buffers):
    """Return the buffers as lists of numbers."""
    return [[float(element) for tensor in buffer for element in tensor] for buffer in buffers]


def weighted(terms, index, places):
    """Return a combination in which workers, their order, the buffer's index and each element's place show."""
    total = terms[0] * (index + 1) + places
    for worker, term in enumerate(terms[1:], start=2):
        total = total * 0.5 + term * worker
    return total


def combined():
    """Return what arrived, what should have, and whether all was in place."""
    from megatron_ext.transport.collectives import part_bounds, through_owners

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    def combine(index, start, terms):
        first = start + part_bounds(sum(LENGTHS[index]), size)[rank]
        terms[rank].copy_(weighted(terms, index, torch.arange(first, first + terms[0].numel())))

    mine = buffers_of(rank)
    found = list(through_owners(iter(mine), dist.group.WORLD, combine))
    in_place = len(found) == len(mine) and all(left is right for left, right in zip(found, mine, strict=True))
    everyone = [[torch.tensor(buffer) for buffer in joined(buffers_of(other))] for other in range(size)]
    expected = [
        weighted([buffers[index] for buffers in everyone], index, torch.arange(sum(lengths))).tolist()
        for index, lengths in enumerate(LENGTHS)
    ]
    return joined(found), expected, in_place


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_buffer_becomes_what_its_owners_made_of_it(workers):
    for found, expected, in_place in run_ranks(combined, workers):
        assert found == expected
        assert in_place


def shared():
    """Return buffers of which every rank filled its own part with its number."""
    from megatron_ext.transport.collectives import from_owners, part_bounds, runs_within

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    buffers = [tuple(torch.full((length,), -1.0) for length in lengths) for lengths in LENGTHS]
    for buffer, lengths in zip(buffers, LENGTHS, strict=True):
        bounds = part_bounds(sum(lengths), size)
        for run in runs_within(buffer, bounds[rank], bounds[rank + 1]):
            run.fill_(rank)
    return joined(from_owners(iter(buffers), dist.group.WORLD))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_part_arrives_from_its_owner(workers):
    results = run_ranks(shared, workers)
    assert all(result == results[0] for result in results)
    for lengths, buffer in zip(LENGTHS, results[0], strict=True):
        assert len(buffer) == sum(lengths)
        assert buffer == sorted(buffer)
        assert set(buffer) <= set(range(workers))


def taken_ahead(buffers):
    """Return how many elements were in flight at most."""
    from megatron_ext.transport import collectives

    collectives.IN_FLIGHT_NUMEL = 100
    dist.init_process_group("gloo")
    taken = 0

    def stream():
        nonlocal taken
        for _ in range(buffers):
            taken += 1
            yield (torch.ones(10), torch.ones(15))

    def keep(index, start, terms):
        pass

    return [taken for _ in collectives.through_owners(stream(), dist.group.WORLD, keep)]


def test_buffers_are_taken_only_when_there_is_room_on_the_way():
    for taken in run_ranks(taken_ahead, 2, 30):
        assert len(taken) == 30
        # 100 elements each way and the buffer that was too many.
        assert max(ahead - finished for finished, ahead in enumerate(taken)) in (8, 9)
