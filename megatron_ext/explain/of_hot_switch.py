# SPDX-License-Identifier: Apache-2.0
"""What hot switching adds: strategies and their ranks, what guests hold while they train, and what switches move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from megatron_ext.explain.rank_figures import MemoryUse, TrafficUse
from megatron_ext.explain.units import ranges
from megatron_ext.hot_switch.feature import HotSwitchFeature
from megatron_ext.hot_switch.planning.plan import SwitchPlan
from megatron_ext.phrases import plural

__all__ = ["facts_of", "lines_of", "memory_of_guests", "traffic_of_switches"]

_GRADIENT_BYTES = 4


def memory_of_guests(guests: Sequence[Any]) -> Iterator[MemoryUse]:
    """Yield what the largest guest of a rank holds in its turn, if none of it is home's own memory.

    Args:
        guests: those of the feature.
    """
    held = []
    for guest in guests:  # whose parameters have no memory, and so no size, outside of their turn
        entries = [(entry, math.prod(entry.slice.local_shape)) for entry in (*guest.view.entries, *guest.view.buffers)]
        parameters = sum(entry.tensor.dtype.itemsize * size for entry, size in entries)
        held.append((parameters, sum(size for entry, size in entries if entry.parameter.requires_grad)))
    if not held:
        return
    parameters, elements = max(held, key=lambda sizes: sizes[0] + _GRADIENT_BYTES * sizes[1])
    yield MemoryUse(cause="weights of the largest guest, at most", nbytes=parameters, by_formula=True)
    yield MemoryUse(cause="gradients of the largest guest", nbytes=_GRADIENT_BYTES * elements, by_formula=True)


def traffic_of_switches(feature: HotSwitchFeature) -> Iterator[TrafficUse]:
    """Yield what a rank sends in the switches of a step in which every guest trains."""
    rank = dist.get_rank(feature.place().group)
    guests = feature.guests
    for guest, after in zip(guests, (*guests, None)[1:], strict=True):
        taken = guest.from_before if guest.may_follow else guest.from_home
        given = guest.to_home if after is None or not after.takes_gradients else after.gradients_from_before
        factor = _GRADIENT_BYTES / taken.tensors[0].tensor.dtype.itemsize
        label = guest.strategy.label
        yield TrafficUse(cause=f"parameters to guest {label}", nbytes=_sent(taken, rank), per="step")
        yield TrafficUse(
            cause=f"gradients of guest {label}", nbytes=round(_sent(given, rank) * factor), per="step"
        )


def facts_of(feature: HotSwitchFeature, layers: int) -> list[dict[str, Any]]:
    """Return the strategies, home first, for programs: sizes, bucket, and the ranks of the first replica by stage.

    Ranks are counted within a worker of local SGD.
    """
    listed = feature.strategies
    found = []
    for index, strategy in enumerate(listed.strategies):
        layout = strategy.layout(layers)
        stages: list[list[int]] = [[] for _ in range(strategy.pp)]
        for rank in range(layout.world_size):
            place = layout.coordinates(rank)
            if place.dp == 0:
                stages[place.pp].append(rank)
        bucket = listed.buckets[index] if listed.buckets else None
        found.append(
            {
                "label": strategy.label,
                "dp": strategy.dp,
                "tp": strategy.tp,
                "pp": strategy.pp,
                "cp": strategy.cp,
                "ep": strategy.ep,
                "lengths": None if bucket is None else [bucket.above + 1, bucket.up_to],
                "first_replica": stages,
            }
        )
    return found


def lines_of(facts: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each strategy."""
    for index, strategy in enumerate(facts):
        lengths = strategy["lengths"]
        which = "" if lengths is None else f", lengths {lengths[0]} to {lengths[1]}"
        stages = "; ".join(f"stage {stage}: {ranges(ranks)}" for stage, ranks in enumerate(strategy["first_replica"]))
        whose = "home" if index == 0 else "guest"
        copies = plural(strategy["dp"], "replica")
        yield f"{whose} {strategy['label']} (DP,TP,PP){which}: {copies}, the first on ranks of {stages}"


def _sent(plan: SwitchPlan, rank: int) -> int:
    return sum(move.nbytes for moves in plan.sends(rank).values() for move in moves)
