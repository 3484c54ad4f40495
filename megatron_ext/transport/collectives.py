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
    outward: deque[_Exchange] = deque()
    homeward: deque[_Exchange] = deque()
    # The buffers whose last segment is on its way, with that segment.
    unfinished: deque[tuple[_Exchange, torch.Tensor]] = deque()

    def move_on(limit: int) -> Iterator[torch.Tensor]:
        """Turn and finish the oldest segments until at most `limit` are on each way."""
        while len(outward) > limit or len(homeward) > limit:
            if len(outward) > limit:
                outward[0].turn()
                homeward.append(outward.popleft())
            if len(homeward) > limit:
                finished = homeward.popleft()
                finished.wait()
                if unfinished and unfinished[0][0] is finished:
                    yield unfinished.popleft()[1]

    for buffer in buffers:
        for segment in buffer.split(SEGMENT_NUMEL):
            outward.append(_Exchange(segment, group, divisor=workers))
            if segment.data_ptr()...
