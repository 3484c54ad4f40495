# SPDX-License-Identifier: Apache-2.0
"""Sums over workers whose bits depend on nothing but the values and the order of the workers.

A ring all-reduce adds the workers in an order that depends on the element's place in the buffer, so with three
or more workers two copies of one tensor at different offsets (tied embeddings on the first and the last pipeline
stage) would drift apart. Here every element is summed by one rank, its owner, from worker 0 upwards, and sent from
there to the others; the traffic is that of a ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Pending", "ordered_means", "padded_numel", "start_ordered_sum"]

# Elements exchanged at a time: enough for bandwidth, few enough that the work on one segment overlaps the exchange
# of the next.
SEGMENT_NUMEL = 1 << 21
# Segments on their way to their owners at a time, and as many on their way back: bounds the extra memory.
SEGMENTS_IN_FLIGHT = 2
# Elements that a processor works on at a time, so that an operation finds in the cache what the last one wrote.
_CACHED_NUMEL = 1 << 16


class Pending(Protocol):
    """A sum on its way."""

    def wait(self) -> None:
        """Return when the buffer holds the sum."""


def padded_numel(numel: int, num_workers: int) -> int:
    """Return `numel` rounded up to a multiple of the number of workers."""
    return -(-numel // num_workers) * num_workers


def start_ordered_sum(buffer: torch.Tensor, group: Any) -> Pending:
    """Start replacing `buffer` by its sum over `group`, added in rank order.

    Args:
        buffer: contiguous 1-D tensor, of one length on all ranks; changed in place.
        group: process group, one rank per worker in worker order.
    """
    return _Exchange(buffer, group, divisor=1)


def ordered_means(buffers: Iterable[torch.Tensor], group: Any) -> Iterator[torch.Tensor]:
    """Yield every buffer, in order, once it holds its mean over `group`: the sum in rank order, divided.

    The next buffer is taken from the iterable only when there is room for it on the way. So preparing a buffer,
    exchanging others, and what the caller does with a finished one overlap, in bounded memory.

    Args:
        buffers: contiguous 1-D tensors, of the same lengths on all ranks; changed in place.
        group: process group, one rank per worker in worker order.
    """
    workers = dist.get_world_size(group)
    outward: deque[_Flight] = deque()
    homeward: deque[_Flight] = deque()
    for buffer in buffers:
        segments = torch.split(buffer, SEGMENT_NUMEL)
        for number, segment in enumerate(segments, start=1):
            exchange = _Exchange(segment, group, divisor=workers)
            outward.append((exchange, buffer if number == len(segments) else None))
            if len(outward) > SEGMENTS_IN_FLIGHT:
                homeward.append(_turned(outward.popleft()))
            if len(homeward) > SEGMENTS_IN_FLIGHT:
                yield from _landed(homeward.popleft())
    while outward or homeward:
        if outward:
            homeward.append(_turned(outward.popleft()))
        yield from _landed(homeward.popleft())


class _Exchange:
    """One segment on its way: its parts to their owners, who sum them, and the sums back to everyone."""

    def __init__(self, segment: torch.Tensor, group: Any, divisor: int) -> None:
        self._group = group
        self._divisor = divisor
        self._rank = dist.get_rank(group)
        self._parts = _split(segment, dist.get_world_size(group))
        own = self._parts[self._rank]
        self._terms = [own if rank == self._rank else torch.empty_like(own) for rank in range(len(self._parts))]
        self._works = self._swap(self._parts, self._terms)
        self._turned = False

    def turn(self) -> None:
        """Wait for the others' share of this rank's part, sum it, and start to send the sum to everyone."""
        self._finish()
        own = self._parts[self._rank]
        _sum_in_order(self._terms, own, self._divisor)
        self._terms = []
        self._works = self._swap([own] * len(self._parts), self._parts)
        self._turned = True

    def wait(self) -> None:
        """Return when the segment holds the sum, divided."""
        if not self._turned:
            self.turn()
        self._finish()

    def _swap(self, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]) -> list[dist.Work]:
        """Start to send `outgoing[rank]` to every other rank and to receive `incoming[rank]` from it."""
        size = len(self._parts)
        operations = []
        for distance in range(1, size):
            # Every rank starts with another peer, so that they do not all send to the same one at once.
            source, target = (self._rank - distance) % size, (self._rank + distance) % size
            if incoming[source].numel():
                operations.append(dist.P2POp(dist.irecv, incoming[source], group=self._group, group_peer=source))
            if outgoing[target].numel():
                operations.append(dist.P2POp(dist.isend, outgoing[target], group=self._group, group_peer=target))
        return dist.batch_isend_irecv(operations) if operations else []

    def _finish(self) -> None:
        for work in self._works:
            work.wait()


# An exchange, and the buffer that is complete when it is (None while more segments of that buffer follow).
_Flight = tuple[_Exchange, torch.Tensor | None]


def _turned(flight: _Flight) -> _Flight:
    flight[0].turn()
    return flight


def _landed(flight: _Flight) -> Iterator[torch.Tensor]:
    exchange, complete = flight
    exchange.wait()
    if complete is not None:
        yield complete


def _split(segment: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut a segment into `count` parts whose lengths differ by at most one."""
    bounds = [segment.numel() * index // count for index in range(count + 1)]
    return [segment[start:end] for start, end in pairwise(bounds)]


def _sum_in_order(terms: list[torch.Tensor], out: torch.Tensor, divisor: int) -> None:
    """Set `out`, which is one of the terms, to their sum from the first to the last, divided by `divisor`.

    The other terms are used up.
    """
    step = _CACHED_NUMEL if out.device.type == "cpu" else max(out.numel(), 1)
    for start in range(0, out.numel(), step):
        end = start + step
        total = terms[0][start:end]
        for term in terms[1:-1]:
            total.add_(term[start:end])
        if len(terms) > 1:
            total = torch.add(total, terms[-1][start:end], out=out[start:end])
        if divisor > 1:
            total.div_(divisor)
