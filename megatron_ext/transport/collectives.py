# SPDX-License-Identifier: Apache-2.0
"""Reductions over workers whose bits depend on nothing but the values and the order of the workers.

A ring all-reduce adds the workers in an order that depends on the element's place in the buffer, so with three
or more workers two copies of one tensor at different offsets (tied embeddings on the first and the last pipeline
stage) would drift apart. Here every element has an owner, one of the workers: all send it their value, it combines
them in worker order, and sends the result to the others. The traffic is that of a ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "CACHED_NUMEL",
    "SEGMENT_NUMEL",
    "Buffer",
    "Combine",
    "Exchange",
    "ExchangeMemory",
    "collective_device",
    "from_owners",
    "ordered_sum",
    "part_bounds",
    "runs_within",
    "through_owners",
]

# Elements of one segment: enough for bandwidth, few enough that the work on one overlaps the exchange of the next.
SEGMENT_NUMEL = 1 << 23
# Elements in flight to their owners at a time, and as many in flight back: bounds the extra memory.
IN_FLIGHT_NUMEL = SEGMENT_NUMEL
# Elements that a processor works on at a time, so that an operation finds in the cache what the last one wrote.
CACHED_NUMEL = 1 << 16

Combine = Callable[[int, int, list[torch.Tensor]], None]
"""`combine(index, start, terms)`: put what everybody gets in place of this rank's own term.

`terms` are all workers' values, 1-D and in worker order, of a run of elements that begins at element `start` of the
part of buffer `index` that this rank owns. `terms[rank]` is the rank's own memory; the others may be used up.
"""

Buffer = Sequence[torch.Tensor]
"""Contiguous 1-D tensors that stand for their concatenation."""


def part_bounds(numel: int, workers: int) -> list[int]:
    """Return the bounds of the parts that `workers` own of a buffer: their lengths differ by at most one."""
    return [numel * worker // workers for worker in range(workers + 1)]


def runs_within(buffer: Buffer, start: int, stop: int) -> list[torch.Tensor]:
    """Return elements `start` to `stop` of a buffer, tensor by tensor."""
    runs = []
    offset = 0
    for tensor in buffer:
        first, last = max(start - offset, 0), min(stop - offset, tensor.numel())
        if first < last:
            runs.append(tensor[first:last])
        offset += tensor.numel()
    return runs


def through_owners(
    buffers: Iterable[Buffer], group: Any, combine: Combine
) -> Iterator[Buffer]:
    """Yield every buffer, in order, once its owners' results have replaced its contents.

    The next buffer is taken from the iterable only when there is room for it in flight. So preparing a buffer,
    exchanging others, and what the caller does with a finished one overlap, in bounded memory.

    Args:
        buffers: of the same lengths on all ranks; changed in place. The extra memory is a few times the largest.
        group: process group, one rank per worker in worker order.
        combine: makes the results of this rank's parts, called buffer by buffer and run by run.
    """
    outward, homeward, memory = _Way(), _Way(), ExchangeMemory()
    for index, buffer in enumerate(buffers):
        outward.append(Exchange(index, buffer, group, memory).start())
        while outward.full:
            homeward.append(outward.popleft().turn(combine))
        while homeward.full:
            yield homeward.popleft().finish()
    while outward or homeward:
        if outward:
            homeward.append(outward.popleft().turn(combine))
        yield homeward.popleft().finish()


def from_owners(buffers: Iterable[Buffer], group: Any) -> Iterator[Buffer]:
    """Yield every buffer, in order, once every part of it holds what its owner has there.

    Args:
        buffers: of the same lengths on all ranks; changed in place.
        group: process group, one rank per worker in worker order.
    """
    homeward = _Way()
    for index, buffer in enumerate(buffers):
        homeward.append(Exchange(index, buffer, group, ExchangeMemory()).return_own())
        while homeward.full:
            yield homeward.popleft().finish()
    while homeward:
        yield homeward.popleft().finish()


def ordered_sum(buffer: torch.Tensor, group: Any) -> None:
    """Replace `buffer` by its sum over `group`, added in rank order.

    Args:
        buffer: contiguous 1-D tensor, of one length on all ranks; changed in place.
        group: process group, one rank per worker in worker order.
    """
    rank = dist.get_rank(group)

    def add(index: int, start: int, terms: list[torch.Tensor]) -> None:
        _add_in_order(terms, terms[rank])

    for _ in through_owners(((segment,) for segment in torch.split(buffer, SEGMENT_NUMEL)), group, add):
        pass


def _add_in_order(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Put the sum of the terms, added in their order, into `out`, which may be one of them."""
    step = CACHED_NUMEL if out.device.type == "cpu" else out.numel()
    for first in range(0, out.numel(), step):
        part = slice(first, first + step)
        total = terms[0][part]
        for term in terms[1:]:
            total = torch.add(total, term[part])
        out[part] = total


def collective_device(group: Any) -> torch.device:
    """Return a device whose tensors the group's backend can carry."""
    if "cpu" in {device.type for device in group._device_types}:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class ExchangeMemory:
    """Buffers that are used again and again: on a processor, fresh memory costs more than what arrives in it."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `like` with undefined contents."""
        free = self._free.get((like.dtype, like.numel()))
        return free.pop() if free else torch.empty_like(like)

    def clear(self) -> None:
        """Give up what is not in use."""
        self._free.clear()

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take back what `take` gave out."""
        for tensor in tensors:
            self._free.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)


class _Way:
    """Exchanges in flight in one direction, in order."""

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque()
        self._numel = 0

    def __bool__(self) -> bool:
        """Return whether any is in flight."""
        return bool(self._exchanges)

    @property
    def full(self) -> bool:
        """Whether the first must arrive before another may start."""
        return self._numel > IN_FLIGHT_NUMEL

    def append(self, exchange: Exchange) -> None:
        """Add the last one."""
        self._exchanges.append(exchange)
        self._numel += exchange.numel

    def popleft(self) -> Exchange:
        """Remove the first one."""
        exchange = self._exchanges.popleft()
        self._numel -= exchange.numel
        return exchange


class Exchange:
    """One buffer in flight: its parts to their owners, and the owners' results back to everyone."""

    def __init__(
        self, index: int, buffer: Buffer, group: Any, memory: ExchangeMemory, parts: Sequence[Buffer] | None = None
    ) -> None:
        """Prepare.

        Args:
            index: number of the buffer.
            buffer: of the same lengths on all ranks.
            group: process group, one rank per worker in worker order.
            memory: where to take what arrives from.
            parts: what of the buffer each rank owns; parts of nearly equal length when None.
        """
        self.numel = sum(tensor.numel() for tensor in buffer)
        self._index = index
        self._buffer = buffer
        self._group = group
        self._memory = memory
        self._rank = dist.get_rank(group)
        # For every owner the runs of elements that are contiguous in memory.
        bounds = part_bounds(self.numel, dist.get_world_size(group))
        self._parts = parts or [runs_within(buffer, start, stop) for start, stop in pairwise(bounds)]
        self._terms: list[Buffer] = []
        self._works: list[dist.Work] = []

    def start(self) -> Exchange:
        """Start to send every owner this rank's values of its part."""
        own = self._parts[self._rank]
        self._terms = [own if part is own else [self._memory.take(run) for run in own] for part in self._parts]
        self._works = self._swap(self._parts, self._terms)
        return self

    def turn(self, combine: Combine) -> Exchange:
        """Wait for the others' values of this rank's part, combine them, and start to send the result back."""
        for start, terms in self.arrived():
            combine(self._index, start, terms)
        return self.return_own()

    def arrived(self) -> list[tuple[int, list[torch.Tensor]]]:
        """Wait for the others' values of this rank's part; return (start, terms) of every run, as `Combine` has it."""
        self._wait()
        found = []
        start = 0
        for terms in zip(*self._terms, strict=True):
            found.append((start, list(terms)))
            start += terms[0].numel()
        return found

    def return_own(self) -> Exchange:
        """Start to send this rank's part to everyone, and to receive theirs."""
        for part in self._terms:
            if part is not self._parts[self._rank]:
                self._memory.give(part)
        self._terms = []
        self._works = self._swap([self._parts[self._rank]] * len(self._parts), self._parts)
        return self

    def finish(self) -> Buffer:
        """Wait for the others' results and return the buffer."""
        self._wait()
        return self._buffer

    def _swap(self, outgoing: Sequence[Buffer], incoming: Sequence[Buffer]) -> list[dist.Work]:
        """Start to send `outgoing[rank]` to every other rank and to receive `incoming[rank]` from it."""
        size = len(self._parts)
        operations = []
        for distance in range(1, size):
            # Every rank starts with another peer, so that they do not all send to the same one at once.
            source, target = (self._rank - distance) % size, (self._rank + distance) % size
            operations += [self._operation(dist.irecv, run, source) for run in incoming[source]]
            operations += [self._operation(dist.isend, run, target) for run in outgoing[target]]
        return dist.batch_isend_irecv(operations) if operations else []

    def _operation(self, kind: Any, run: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, run, group=self._group, group_peer=peer)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
