# SPDX-License-Identifier: Apache-2.0
"""Who sends a slice when several ranks hold it: five rules, each a function from demands to senders.

HotSPa's names for four of them are NEW_GREEDY (`balanced`), GREEDY, ROUND_ROBIN and FCFS; it has none for `joint`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace

from megatron_ext.hot_switch.planning.routes import Demand

__all__ = ["ALGORITHMS", "ChooseSenders"]

ChooseSenders = Callable[[Sequence[Demand], int], list[int]]
"""Called for one tensor after the other with its demands and the bytes of a slice; returns each demand's sender."""


def balanced(world_size: int) -> ChooseSenders:
    """Return the rule that loads all senders alike and stays within the receiver's node where it can.

    Bytes sent within nodes and between nodes are counted apart. An owner on the receiver's node is preferred; among
    those, or among all where there is none, the one that has sent the fewest bytes sends, the lowest rank of equals.
    """
    within = [0] * world_size
    between = [0] * world_size

    def choose(demands: Sequence[Demand], slice_bytes: int) -> list[int]:
        senders = []
        heap: list[tuple[int, int]] = []
        heap_of = -1
        for demand in demands:
            if demand.near_owners:
                sender = min(demand.near_owners, key=within.__getitem__)
                within[sender] += slice_bytes
            else:
                # All receivers far from a slice choose among the same owners, which may be hundreds: a heap per slice.
                if heap_of != demand.slice_index:
                    heap = [(between[owner], owner) for owner in demand.owners]
                    heapify(heap)
                    heap_of = demand.slice_index
                sender = heap[0][1]
                between[sender] += slice_bytes
                heapreplace(heap, (between[sender], sender))
            senders.append(sender)
        return senders

    return choose


def joint(world_size: int) -> ChooseSenders:
    """Return the rule that loads all senders alike over both links together, and stays within the node where it can.

    As many bytes cross between nodes as with `balanced`, but who has many of those to send is spared within its node.
    So the busiest rank sends less in all, and may send more between nodes: for ranks whose links share one port.
    """
    sent = [0] * world_size

    def choose(demands: Sequence[Demand], slice_bytes: int) -> list[int]:
        senders = [0] * len(demands)
        candidates = [demand.near_owners or demand.owners for demand in demands]
        # Who has no choice comes first, so that those who have one can make up for it.
        for number in sorted(range(len(demands)), key=lambda number: len(candidates[number])):
            sender = min(candidates[number], key=sent.__getitem__)
            sent[sender] += slice_bytes
            senders[number] = sender
        return senders

    return choose


def greedy(world_size: int) -> ChooseSenders:
    """Return the rule that takes the owner with the fewest slices between it and the receiver, either way."""
    exchanged: dict[int, int] = {}

    def choose(demands: Sequence[Demand], slice_bytes: int) -> list[int]:
        senders = []
        for demand in demands:
            receiver = demand.receiver
            pairs = [min(owner, receiver) * world_size + max(owner, receiver) for owner in demand.owners]
            counts = [exchanged.get(pair, 0) for pair in pairs]
            best = counts.index(min(counts))
            exchanged[pairs[best]] = counts[best] + 1
            senders.append(demand.owners[best])
        return senders

    return choose


def round_robin(world_size: int) -> ChooseSenders:
    """Return the rule that rotates through the owners of a slice, receiver by receiver."""

    def choose(demands: Sequence[Demand], slice_bytes: int) -> list[int]:
        senders = []
        turn, slice_index = 0, -1
        for demand in demands:
            turn = turn + 1 if demand.slice_index == slice_index else 0
            slice_index = demand.slice_index
            senders.append(demand.owners[turn % len(demand.owners)])
        return senders

    return choose


def fcfs(world_size: int) -> ChooseSenders:
    """Return the rule that always takes the first owner."""

    def choose(demands: Sequence[Demand], slice_bytes: int) -> list[int]:
        return [demand.owners[0] for demand in demands]

    return choose


ALGORITHMS: dict[str, Callable[[int], ChooseSenders]] = {
    "balanced": balanced,
    "joint": joint,
    "greedy": greedy,
    "round-robin": round_robin,
    "fcfs": fcfs,
}
"""Each called with the number of ranks at the start of a plan, because rules remember what they gave to whom."""
