# SPDX-License-Identifier: Apache-2.0
"""What a plan costs: bytes per rank and link, messages, memory, and an estimate of the time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.hot_switch.planning.plan import SwitchPlan
from megatron_ext.hot_switch.planning.routes import SliceRoute

__all__ = ["Links", "SwitchFigures", "measure_plan"]

PerRank = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Links:
    """What one GPU can send, and at the same time receive, in bytes per second."""

    within_node: float
    """To and from GPUs of its node, all together."""

    between_nodes: float
    """To and from GPUs of other nodes, all together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SwitchFigures:
    """The cost of one switch. Bytes are those of tensors that leave their rank; what stays costs none."""

    sent_within: PerRank
    """Bytes that each rank sends to its own node."""

    sent_between: PerRank
    """Bytes that each rank sends to other nodes."""

    received_within: PerRank
    """Bytes that each rank receives from its own node."""

    received_between: PerRank
    """Bytes that each rank receives from other nodes."""

    slices: int
    """Slices that move, each counted once per receiver."""

    messages: int
    """Ordered pairs of a sender and a receiver: what is left when all slices between two ranks go as one."""

    held_before: PerRank
    """Bytes of the tensors of each rank before the switch."""

    held_after: PerRank
    """Bytes of its tensors after the switch."""

    aliased: PerRank
    """Bytes of the new tensors that lie inside the old ones and so take no memory of their own."""

    @property
    def bytes_total(self) -> int:
        """Bytes received by all ranks together."""
        return int(self.received_within.sum() + self.received_between.sum())

    @property
    def bytes_inter_node(self) -> int:
        """Bytes among those that come from another node."""
        return int(self.received_between.sum())

    @property
    def max_sent(self) -> int:
        """Bytes that the busiest sender sends."""
        return int((self.sent_within + self.sent_between).max())

    @property
    def max_received(self) -> int:
        """Bytes that the busiest receiver receives."""
        return int((self.received_within + self.received_between).max())

    @property
    def max_held_during(self) -> int:
        """Bytes of old and new tensors on the fullest rank, when nothing is freed before all has arrived."""
        return int((self.held_before + self.held_after - self.aliased).max())

    def seconds(self, links: Links) -> float:
        """Return the time of the busiest link when all links work at once, at full speed and without latency.

        This is a lower bound: packing, local copies, and contention between GPUs for one link come on top.
        """
        within = max(self.sent_within.max(), self.received_within.max()) / links.within_node
        between = max(self.sent_between.max(), self.received_between.max()) / links.between_nodes
        return float(max(within, between))


def measure_plan(plan: SwitchPlan) -> SwitchFigures:
    """Add up what a plan moves and holds, per rank."""
    sent = np.zeros((2, plan.world_size), dtype=np.int64)
    received = np.zeros((2, plan.world_size), dtype=np.int64)
    slices = 0
    pairs: set[int] = set()
    for planned in plan.tensors:
        senders, receivers = planned.senders, planned.route.receivers
        is_far = (senders // plan.gpus_per_node != receivers // plan.gpus_per_node).astype(np.int64)
        for link in (0, 1):
            for totals, ends in ((sent, senders), (received, receivers)):
                counts = np.bincount(ends[is_far == link], minlength=plan.world_size)
                totals[link] += counts * planned.slice_bytes
        slices += len(senders)
        pairs.update(np.unique(senders.astype(np.int64) * plan.world_size + receivers).tolist())
    held_before, held_after, aliased = _memory(plan)
    return SwitchFigures(
        sent_within=sent[0],
        sent_between=sent[1],
        received_within=received[0],
        received_between=received[1],
        slices=slices,
        messages=len(pairs),
        held_before=held_before,
        held_after=held_after,
        aliased=aliased,
    )


def _memory(plan: SwitchPlan) -> tuple[PerRank, PerRank, PerRank]:
    """Bytes held before, held after, and aliased by each rank."""
    # Routes are few and tensors are many: add up the tensors of a route before looking at its ranks.
    routes: dict[int, SliceRoute] = {}
    whole_bytes: dict[int, int] = {}
    aliasable_bytes: dict[int, int] = {}
    for planned in plan.tensors:
        route, key = planned.route, id(planned.route)
        routes[key] = route
        nbytes = planned.slice_bytes * route.slices
        whole_bytes[key] = whole_bytes.get(key, 0) + nbytes
        if planned.is_contiguous:
            aliasable_bytes[key] = aliasable_bytes.get(key, 0) + nbytes
    before, after, aliased = (np.zeros(plan.world_size, dtype=np.int64) for _ in range(3))
    for key, route in routes.items():
        before[list(route.source_part)] += whole_bytes[key] // route.source_parts
        after[list(route.target_part)] += whole_bytes[key] // route.target_parts
        aliased[list(route.complete)] += aliasable_bytes.get(key, 0) // route.target_parts
    return before, after, aliased
