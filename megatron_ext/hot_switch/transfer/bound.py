# SPDX-License-Identifier: Apache-2.0
"""An itinerary bound to memory: the views that one switch reads and writes, kept for the next one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.transfer.itinerary import ROUNDS_IN_FLIGHT, Copy, Itinerary, Parcel, SwitchRound
from megatron_ext.hot_switch.transfer.messages import MessagePart

__all__ = ["BoundRound", "BoundSwitch", "bind"]

Tensors = Mapping[str, torch.Tensor]
Extent = tuple[int, int, str]
"""First and last byte address of what is read or written, and the tensor's name."""


@dataclass(kw_only=True)
class BoundRound:
    """One round; lists of the same length belong together, entry by entry."""

    operations: list[dist.P2POp] = field(default_factory=list)
    """Receives, then sends."""

    pack_from: list[torch.Tensor] = field(default_factory=list)
    """Boxes of tensors to copy before the sends."""

    pack_into: list[torch.Tensor] = field(default_factory=list)
    """Their places in the staging memory."""

    unpack_from: list[torch.Tensor] = field(default_factory=list)
    """Places in the staging memory to copy from after the receives."""

    unpack_into: list[torch.Tensor] = field(default_factory=list)
    """Boxes of tensors that they go to."""


@dataclass(frozen=True, kw_only=True)
class BoundSwitch:
    """All that a switch reads and writes."""

    sources: Tensors
    """The tensors that it reads; they keep their memory alive, so that nothing else can lie there."""

    targets: Tensors
    """The tensors that it writes."""

    has_own_targets: bool
    """Whether the targets are the executor's."""

    results: Tensors
    """What the switch returns."""

    rounds: list[BoundRound]
    """What travels."""

    stay_from: list[torch.Tensor]
    """Boxes that stay on the rank and are copied."""

    stay_into: list[torch.Tensor]
    """Where they go."""

    def fits(self, tensors: Tensors, out: Tensors | None) -> bool:
        """Return whether a switch of these tensors would read and write the same memory."""
        if self.has_own_targets != (out is None) or not _same_memory(self.sources, tensors):
            return False
        return out is None or _same_memory(self.targets, out)


def bind(
    itinerary: Itinerary,
    tensors: Tensors,
    targets: Tensors,
    staging: Sequence[torch.Tensor],
    group: Any,
    *,
    has_own_targets: bool,
    adds: bool,
) -> BoundSwitch:
    """Return the views of a switch.

    Args:
        itinerary: what the rank does.
        tensors: what it holds before, by name.
        targets: where to write, by name; the executor's lack the aliased ones.
        staging: one piece of memory for each round in flight.
        group: process group of the messages.
        has_own_targets: whether the targets are the executor's.
        adds: whether values are added to what is there.

    Raises:
        UserError: a tensor that is written lies in the memory of one that is read.
    """
    sources = {name: tensors[name].detach() for name in itinerary.sources}
    targets = {name: tensor.detach() for name, tensor in targets.items()}
    aliases = {name for name in itinerary.aliases if name not in targets}
    copies = [*itinerary.copies, *(itinerary.whole(name) for name in itinerary.aliases if name not in aliases)]
    if not adds:
        copies = [copy for copy in copies if not _is_in_place(copy, sources, targets)]
    _refuse_overlap(itinerary, copies, sources, targets)
    results = dict(targets)
    for name in aliases:
        source_name, window = itinerary.aliases[name]
        results[name] = window.view(sources[source_name])
    return BoundSwitch(
        sources=sources,
        targets=targets,
        has_own_targets=has_own_targets,
        results={name: results[name] for name in itinerary.targets},
        rounds=[
            _bind_round(each, sources, targets, staging[number % ROUNDS_IN_FLIGHT], group)
            for number, each in enumerate(itinerary.rounds)
        ],
        stay_from=[copy.source.view(sources[copy.source_name]) for copy in copies],
        stay_into=[copy.target.view(targets[copy.target_name]) for copy in copies],
    )


def _bind_round(each: SwitchRound, sources: Tensors, targets: Tensors, staging: torch.Tensor, group: Any) -> BoundRound:
    bound = BoundRound()
    for parcel in each.receives:
        part = parcel.message.parts[0]
        if parcel.staged_at is None:
            arriving = part.target.view(targets[part.target_name])
        else:
            arriving, places = _staged(parcel, staging)
            bound.unpack_from += places
            bound.unpack_into += [other.target.view(targets[other.target_name]) for other in parcel.message.parts]
        bound.operations.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=parcel.peer))
    packed = set()
    for parcel in each.sends:
        part = parcel.message.parts[0]
        if parcel.staged_at is None:
            leaving = part.source.view(sources[part.source_name])
        else:
            leaving, places = _staged(parcel, staging)
            if parcel.staged_at not in packed:
                packed.add(parcel.staged_at)
                bound.pack_into += places
                bound.pack_from += [other.source.view(sources[other.source_name]) for other in parcel.message.parts]
        bound.operations.append(dist.P2POp(dist.isend, leaving, group=group, group_peer=parcel.peer))
    return bound


def _staged(parcel: Parcel, staging: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a parcel's place in the staging memory, as a whole and part by part."""
    assert parcel.staged_at is not None
    message = parcel.message
    whole = staging[parcel.staged_at : parcel.staged_at + message.nbytes].view(message.dtype)
    numels = [part.source.numel for part in message.parts]
    parts = [flat.view(part.source.shape) for flat, part in zip(torch.split(whole, numels), message.parts, strict=True)]
    return whole, parts


def _same_memory(ours: Tensors, theirs: Tensors) -> bool:
    return all(tensor.data_ptr() == theirs[name].data_ptr() for name, tensor in ours.items())


def _is_in_place(copy: Copy, sources: Tensors, targets: Tensors) -> bool:
    source, target = copy.source.view(sources[copy.source_name]), copy.target.view(targets[copy.target_name])
    return source.data_ptr() == target.data_ptr() and source.stride() == target.stride()


def _refuse_overlap(itinerary: Itinerary, copies: Sequence[Copy], sources: Tensors, targets: Tensors) -> None:
    """Raise if something is written where something else is read: it might be lost before it was sent."""
    received = [part for each in itinerary.rounds for parcel in each.receives for part in parcel.message.parts]
    reads = _joined([_extent(tensor, name) for name, tensor in sources.items()])
    starts = [first for first, _, _ in reads]
    written: list[MessagePart | Copy] = [*received, *copies]
    for entry in written:
        first, last, name = _extent(entry.target.view(targets[entry.target_name]), entry.target_name)
        # Of the reads, which do not overlap each other, the last one that begins no later than the write ends.
        number = bisect_right(starts, last) - 1
        if number >= 0 and reads[number][1] >= first:
            raise UserError(
                f"the switch would write {name} into memory of {reads[number][2]}, which it reads: give `out`, other "
                f"memory for the results"
            )


def _extent(tensor: torch.Tensor, name: str) -> Extent:
    numel = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + numel * tensor.element_size() - 1, name


def _joined(extents: Sequence[Extent]) -> list[Extent]:
    """Sort extents, and join those that overlap."""
    found: list[Extent] = []
    for extent in sorted(extents):
        if found and extent[0] <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], extent[1]), found[-1][2]
        else:
            found.append(extent)
    return found
