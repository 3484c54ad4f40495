# SPDX-License-Identifier: Apache-2.0
"""All ranks of a job in one process: carries a plan out on real tensors, and checks it on the way."""

from collections.abc import Mapping, Sequence

import torch

from megatron_ext.hot_switch import Move, SwitchPlan
from megatron_ext.params import GptShape, Placement, scatter

Shards = list[dict[str, torch.Tensor]]
"""What each rank holds: local tensors by the names of `Placed.name`."""


def shards_of(values: Mapping[str, torch.Tensor], shape: GptShape, layout: object) -> Shards:
    """Cut full values into what every rank of a layout holds."""
    placement = Placement(shape, layout)
    return [scatter(values, placement.on_rank(rank)) for rank in range(layout.world_size)]


def carry_out(plan: SwitchPlan, shape: GptShape, old: Shards) -> Shards:
    """Return what every rank holds after the switch.

    Messages are flat, one per pair of ranks, and all packed before any is unpacked. Asserts that each element of each
    new tensor is written exactly once.
    """
    sent = {
        (rank, peer): pack(moves, old[rank])
        for rank in range(plan.world_size)
        for peer, moves in plan.sends(rank).items()
    }
    placement = Placement(shape, plan.target)
    new: Shards = []
    for rank in range(plan.world_size):
        held = {placed.name: placed for placed in placement.on_rank(rank)}
        mine = {name: torch.zeros(placed.slice.local_shape, dtype=placed.tensor.dtype) for name, placed in held.items()}
        written = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in mine.items()}
        for stay in plan.stays(rank):
            source, target = old[rank][stay.source_name], mine[stay.target_name]
            if stay.alias_offset is None:
                for box in stay.boxes:
                    view(target, box.target_start, box.shape).copy_(view(source, box.source_start, box.shape))
                    view(written[stay.target_name], box.target_start, box.shape).add_(1)
            else:
                flat = source.view(-1)[stay.alias_offset : stay.alias_offset + target.numel()]
                mine[stay.target_name] = flat.view(target.shape)
                written[stay.target_name] += 1
        for peer, moves in plan.receives(rank).items():
            unpack(moves, sent.pop((peer, rank)), mine, written)
        for name, count in written.items():
            assert torch.equal(count, torch.ones_like(count)), (rank, name)
        new.append(mine)
    assert not sent, "a message was sent that nobody receives"
    return new


def pack(moves: Sequence[Move], local: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the message of these moves, as bytes."""
    parts = [
        view(local[move.source_name], box.source_start, box.shape).contiguous().view(-1).view(torch.uint8)
        for move in moves
        for box in move.boxes
    ]
    assert sum(part.numel() for part in parts) == sum(move.nbytes for move in moves)
    return torch.cat(parts)


def unpack(
    moves: Sequence[Move],
    message: torch.Tensor,
    mine: Mapping[str, torch.Tensor],
    written: Mapping[str, torch.Tensor],
) -> None:
    """Put a message's slices to their places, and count what was written."""
    at = 0
    for move in moves:
        for box in move.boxes:
            target = view(mine[move.target_name], box.target_start, box.shape)
            size = target.numel() * target.element_size()
            target.copy_(message[at : at + size].clone().view(target.dtype).view(box.shape))
            view(written[move.target_name], box.target_start, box.shape).add_(1)
            at += size
    assert at == message.numel()


def view(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The part of `tensor` in a box."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
