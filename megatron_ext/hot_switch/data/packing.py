# SPDX-License-Identifier: Apache-2.0
"""From the lengths of a global batch to the rows that each strategy and each data-parallel replica trains.

Everything here is a function of the lengths, so that all ranks come to the same result on their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.hot_switch.strategies.strategy_list import Bucket, StrategyList

__all__ = ["Row", "StrategyBatch", "first_fit_decreasing", "plan_batch", "split_by_length"]

Row = tuple[int, ...]
"""Sequences of the global batch, by number, that lie one behind the other; empty for a row of zero weight."""


@dataclass(frozen=True, kw_only=True)
class StrategyBatch:
    """What one strategy trains of a global batch."""

    row_length: int
    """Positions of every row."""

    micro_batches: tuple[tuple[tuple[Row, ...], ...], ...]
    """The rows of each micro-batch of each data-parallel replica. All replicas have as many micro-batches and all
    micro-batches as many rows."""

    @property
    def count(self) -> int:
        """Micro-batches of a replica."""
        return len(self.micro_batches[0])

    @property
    def positions(self) -> int:
        """Positions that are computed, padding included."""
        return self.row_length * sum(len(rows) for replica in self.micro_batches for rows in replica)


def plan_batch(
    lengths: Sequence[int], strategies: StrategyList, *, packs: bool = True
) -> tuple[StrategyBatch | None, ...]:
    """Split a global batch by length, pack each part into rows, and deal the rows out.

    Rows are as long as the longest one of the strategy needs, not more than its bucket. Where rows do not divide
    over the replicas, rows of zero weight fill up, so that no token is left out and all replicas make the same steps.

    Args:
        lengths: positions of each sequence of the global batch, each at least 1 and within some bucket.
        strategies: with buckets.
        packs: whether a row has as many sequences as fit into the bucket's longest one; else one, and padding.

    Returns:
        One entry per strategy, home first; None for a guest without data. Home always has a micro-batch: it ends the
        training step.
    """
    parts = split_by_length(lengths, strategies.buckets)
    found: list[StrategyBatch | None] = []
    rows: list[Row]
    for number, (strategy, bucket, part) in enumerate(
        zip(strategies.strategies, strategies.buckets, parts, strict=True)
    ):
        if not part and number > 0:
            found.append(None)
            continue
        rows = [(sequence,) for sequence in part]
        if packs:
            bins = first_fit_decreasing([lengths[sequence] for sequence in part], bucket.up_to)
            rows = [tuple(part[place] for place in row) for row in bins]
        longest = max((sum(lengths[sequence] for sequence in row) for row in rows), default=1)
        multiple = strategy.row_multiple
        found.append(
            StrategyBatch(row_length=math.ceil(longest / multiple) * multiple, micro_batches=_deal(rows, strategy))
        )
    return tuple(found)


def split_by_length(lengths: Sequence[int], buckets: Sequence[Bucket]) -> list[list[int]]:
    """Return the sequences of each bucket, by number, in their order.

    Raises:
        ValueError: a sequence belongs to no bucket.
    """
    parts: list[list[int]] = [[] for _ in buckets]
    for sequence, length in enumerate(lengths):
        for part, bucket in zip(parts, buckets, strict=True):
            if bucket.above < length <= bucket.up_to:
                part.append(sequence)
                break
        else:
            raise ValueError(f"a sequence of {length} positions belongs to no bucket")
    return parts


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins: the longest first, each into the first bin with room for it.

    Args:
        lengths: of the items, each at most `capacity`.
        capacity: of a bin.

    Returns:
        The items of each bin, by number; of equal lengths the earlier item goes first.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        for number, free in enumerate(room):
            if lengths[item] <= free:
                bins[number].append(item)
                room[number] -= lengths[item]
                break
        else:
            bins.append([item])
            room.append(capacity - lengths[item])
    return bins


def _deal(rows: Sequence[Row], strategy: Strategy) -> tuple[tuple[tuple[Row, ...], ...], ...]:
    """Give row r to replica r mod dp, and make micro-batches of each replica's rows."""
    size = strategy.micro_batch_size
    count = max(1, math.ceil(len(rows) / (strategy.dp * size)))
    count = strategy.runnable_micro_batches(count)
    filled = [*rows, *[()] * (count * size * strategy.dp - len(rows))]
    replicas = [filled[replica :: strategy.dp] for replica in range(strategy.dp)]
    return tuple(tuple(tuple(own[first : first + size]) for first in range(0, len(own), size)) for own in replicas)
