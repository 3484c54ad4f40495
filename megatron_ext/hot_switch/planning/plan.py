# SPDX-License-Identifier: Apache-2.0
"""The plan of a switch: what stays, what moves, and who sends it to whom.

The algorithm is that of HotSPa's switch planner ("Enabling Parallelism Hot Switching for Efficient Training of Large
Language Models", SOSP 2024): slices by the least common multiple, local reuse, balanced senders. Every rank computes
the same plan from the same arguments; nothing needs to be exchanged for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.planning.holders import Holders, Holding
from megatron_ext.hot_switch.planning.routes import SliceRoute, make_route
from megatron_ext.hot_switch.planning.senders import ALGORITHMS
from megatron_ext.params import GlobalTensor, GptShape, Layout, Overlap, Placement, Slice, flat_offset, overlaps
from megatron_ext.params.boxes import cut, slice_of, whole

__all__ = ["MOST_GPUS_PER_NODE", "Move", "PlannedTensor", "Stay", "SwitchPlan", "plan_switch"]

MOST_GPUS_PER_NODE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Move:
    """One slice of one tensor in flight from one rank to another."""

    tensor: GlobalTensor
    """The tensor."""

    slice_index: int
    """Which slice, from 0; a tensor's slices follow each other along its split axis."""

    source_name: str
    """The tensor's name on the sender (a tied embedding has two)."""

    target_name: str
    """Its name on the receiver."""

    source_shape: tuple[int, ...]
    """Shape of the sender's local tensor."""

    target_shape: tuple[int, ...]
    """Shape of the receiver's local tensor."""

    boxes: tuple[Overlap, ...]
    """Where the slice lies in the sender's and in the receiver's local tensor, one box per block of the tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the slice in bytes."""
        return sum(math.prod(box.shape) for box in self.boxes) * self.tensor.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Stay:
    """What a rank needs of one tensor after the switch and holds before."""

    tensor: GlobalTensor
    """The tensor."""

    source_name: str
    """The tensor's name on the rank before the switch."""

    target_name: str
    """Its name after the switch."""

    source_shape: tuple[int, ...]
    """Shape of the local tensor before the switch."""

    target_shape: tuple[int, ...]
    """Shape of the local tensor after the switch."""

    boxes: tuple[Overlap, ...]
    """Where the elements lie in the old and in the new local tensor."""

    alias_offset: int | None
    """Where the new local tensor begins in the flattened old one, if it is a contiguous part of that and so needs no
    copy; None when the boxes must be copied."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedTensor:
    """One tensor of a plan."""

    tensor: GlobalTensor
    """The tensor."""

    route: SliceRoute
    """What must move; shared by all tensors that lie on the same ranks."""

    senders: npt.NDArray[np.int32]
    """Who meets each of `route.demands`."""

    slice_bytes: int
    """Size of one slice."""

    @property
    def is_contiguous(self) -> bool:
        """Whether a part of the target, where all of it lies within one part of the source, has no gap there."""
        split = self.tensor.split
        if split is None or self.route.source_parts == self.route.target_parts:
            return True
        return split.axis == 0 and len(split.blocks) == 1


class SwitchPlan:
    """Everything that a switch between two layouts moves.

    Attributes:
        source: the layout before the switch.
        target: the layout after it; of the same number of ranks.
        gpus_per_node: ranks of a node.
        tensors: one entry per tensor that is planned for, in the order of their use.
    """

    def __init__(
        self, source: Holders, target: Holders, gpus_per_node: int, tensors: tuple[PlannedTensor, ...]
    ) -> None:
        """Hold what `plan_switch` decided."""
        self.source = source.placement.layout
        self.target = target.placement.layout
        self.gpus_per_node = gpus_per_node
        self.tensors = tensors
        self._holders = (source, target)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.source.world_size

    @property
    def bytes_moved(self) -> int:
        """Bytes of parameters and buffers that go from one rank to another, all ranks together."""
        return sum(len(planned.senders) * planned.slice_bytes for planned in self.tensors)

    def sends(self, rank: int) -> dict[int, tuple[Move, ...]]:
        """Return the moves that `rank` sends, by receiver, whose `receives` has the same moves in the same order."""
        return self._moves(rank, of_sender=True)

    def receives(self, rank: int) -> dict[int, tuple[Move, ...]]:
        """Return the moves that `rank` receives, by sender, in the order of sending."""
        return self._moves(rank, of_sender=False)

    def stays(self, rank: int) -> tuple[Stay, ...]:
        """Return the parts of its own tensors that `rank` reuses.

        Together with `receives` this is every element that the rank holds after the switch, exactly once.
        """
        found = []
        for planned in self.tensors:
            if not planned.route.kept(rank):
                continue
            before, after = self._slices(planned, rank, rank)
            boxes = tuple(overlaps(before, after))
            offset = None
            if planned.is_contiguous and rank in planned.route.complete:
                # Where there are several boxes, they lie one behind the other in both tensors.
                offset = flat_offset(before.local_shape, boxes[0].source_start, boxes[0].shape)
            names = self._names(planned.tensor, rank, rank)
            found.append(
                Stay(
                    tensor=planned.tensor,
                    source_name=names[0],
                    target_name=names[1],
                    source_shape=before.local_shape,
                    target_shape=after.local_shape,
                    boxes=boxes,
                    alias_offset=offset,
                )
            )
        return tuple(found)

    def _moves(self, rank: int, *, of_sender: bool) -> dict[int, tuple[Move, ...]]:
        found: dict[int, list[Move]] = {}
        for planned in self.tensors:
            ends = planned.senders if of_sender else planned.route.receivers
            for number in np.flatnonzero(ends == rank):
                demand, sender = planned.route.demands[number], int(planned.senders[number])
                peer = demand.receiver if of_sender else sender
                found.setdefault(peer, []).append(self._move(planned, demand.slice_index, sender, demand.receiver))
        return {peer: tuple(moves) for peer, moves in sorted(found.items())}

    def _move(self, planned: PlannedTensor, slice_index: int, sender: int, receiver: int) -> Move:
        tensor, route = planned.tensor, planned.route
        before, after = self._slices(planned, sender, receiver)
        if tensor.split is None:
            moved = whole(tensor.shape)
        else:
            moved = cut(tensor.name, tensor.shape, tensor.split, slice_index, route.slices)
        # Both lists follow the pieces of the slice, so that their entries belong together.
        boxes = tuple(
            Overlap(there.source_start, here.source_start, here.shape)
            for there, here in zip(overlaps(before, moved), overlaps(after, moved), strict=True)
        )
        names = self._names(tensor, sender, receiver)
        return Move(
            tensor=tensor,
            slice_index=slice_index,
            source_name=names[0],
            target_name=names[1],
            source_shape=before.local_shape,
            target_shape=after.local_shape,
            boxes=boxes,
        )

    def _slices(self, planned: PlannedTensor, sender: int, receiver: int) -> tuple[Slice, Slice]:
        route = planned.route
        return (
            slice_of(planned.tensor, route.source_part[sender], route.source_parts),
            slice_of(planned.tensor, route.target_part[receiver], route.target_parts),
        )

    def _names(self, tensor: GlobalTensor, sender: int, receiver: int) -> tuple[str, str]:
        return self._holders[0].name_on(tensor, sender), self._holders[1].name_on(tensor, receiver)


def plan_switch(
    shape: GptShape,
    source: Layout,
    target: Layout,
    *,
    gpus_per_node: int = 8,
    algorithm: str = "balanced",
    without: Collection[str] = (),
) -> SwitchPlan:
    """Plan how the parameters and persistent buffers of a GPT go from one layout to another.

    Args:
        shape: the model; its dtype is that of what moves.
        source: the layout before the switch.
        target: the layout after it.
        gpus_per_node: ranks of a node; node i has the ranks from i * gpus_per_node.
        algorithm: a key of `ALGORITHMS`; who sends a slice that several ranks hold.
        without: names of tensors to leave out, such as frozen ones of a plan for gradients.

    Raises:
        UserError: the layouts have different numbers of ranks, the ranks do not fill their nodes, or the algorithm is
            not known.
        ParamsError: a layout cannot hold the model.
    """
    _check(source.world_size, target.world_size, gpus_per_node, algorithm)
    before, after = Holders(Placement(shape, source)), Holders(Placement(shape, target))
    choose = ALGORITHMS[algorithm](source.world_size)
    routes: dict[tuple[Holding, Holding], SliceRoute] = {}
    tensors = []
    for tensor in _in_order_of_use(before.placement.tensors):
        if tensor.name in without:
            continue
        holdings = before.holding(tensor), after.holding(tensor)
        if holdings not in routes:
            routes[holdings] = make_route(before.ranks(holdings[0]), after.ranks(holdings[1]), gpus_per_node)
        route = routes[holdings]
        for parts in (route.source_parts, route.target_parts):
            slice_of(tensor, 0, parts)  # refuses parts that are not equal
        slice_bytes = tensor.numel // route.slices * tensor.dtype.itemsize
        senders = np.array(choose(route.demands, slice_bytes), dtype=np.int32)
        tensors.append(PlannedTensor(tensor=tensor, route=route, senders=senders, slice_bytes=slice_bytes))
    return SwitchPlan(before, after, gpus_per_node, tuple(tensors))


def _in_order_of_use(tensors: Sequence[GlobalTensor]) -> list[GlobalTensor]:
    """Put the attention's output projection, which Megatron lists before the input projection, behind it.

    HotSPa gives out senders in this order, and balanced choices depend on the order.
    """
    ordered: list[GlobalTensor] = []
    held_back: list[GlobalTensor] = []
    for tensor in tensors:
        if ".self_attention.linear_proj." in tensor.name:
            held_back.append(tensor)
            continue
        if ".self_attention." not in tensor.name:
            ordered += held_back
            held_back = []
        ordered.append(tensor)
    return ordered + held_back


def check_nodes(ranks: int, gpus_per_node: int, option: str = "--gpus-per-node") -> None:
    """Check that ranks fill nodes.

    Args:
        ranks: of all nodes.
        gpus_per_node: of one.
        option: by which the latter was given.

    Raises:
        UserError: they do not.
    """
    if gpus_per_node > MOST_GPUS_PER_NODE:
        raise UserError(f"{option} is {gpus_per_node}; it must be 1 to {MOST_GPUS_PER_NODE}")
    if gpus_per_node < 1 or (ranks > gpus_per_node and ranks % gpus_per_node):
        raise UserError(
            f"{ranks} ranks do not fill nodes of {gpus_per_node} GPUs; set {option} to a divisor of {ranks}"
        )


def _check(source_ranks: int, target_ranks: int, gpus_per_node: int, algorithm: str) -> None:
    if source_ranks != target_ranks:
        raise UserError(
            f"a switch needs the same ranks before and after, but the layouts have {source_ranks} and {target_ranks}"
        )
    check_nodes(source_ranks, gpus_per_node)
    if algorithm not in ALGORITHMS:
        raise UserError(f"algorithm '{algorithm}' is not known; use one of {', '.join(ALGORITHMS)}")
