# SPDX-License-Identifier: Apache-2.0
"""The itinerary: what one rank does in a switch, worked out once and followed many times.

Everything is an offset by now: nothing of the plan is looked at again while tensors move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatron_ext.hot_switch.planning.plan import Move, Stay, SwitchPlan
from megatron_ext.hot_switch.transfer.messages import Message, MessageSizes, messages_between, moved_dtype
from megatron_ext.hot_switch.transfer.windows import Window, row_major, window_of

__all__ = ["ROUNDS_IN_FLIGHT", "Copy", "Itinerary", "LocalTensor", "Parcel", "SwitchRound", "make_itinerary"]

ROUNDS_IN_FLIGHT = 2
"""Rounds in flight at a time: while one travels, the next is packed and the last one is unpacked."""

# Staged messages begin at multiples of this, so that they can be viewed in any type.
_ALIGNMENT = 64


@dataclass(frozen=True)
class LocalTensor:
    """What a rank's tensor must look like, or will."""

    shape: tuple[int, ...]
    """Local shape."""

    dtype: torch.dtype
    """Type of the elements."""


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A message at one of its ends."""

    peer: int
    """Rank at the other end."""

    message: Message
    """What it carries."""

    staged_at: int | None
    """First byte of its place in the round's staging memory; None for a message that is a run of the rank's own
    tensors. Parcels that carry the same have the same place."""


@dataclass(frozen=True, kw_only=True)
class SwitchRound:
    """Parcels that are in flight together."""

    receives: tuple[Parcel, ...]
    """What arrives, in order for each peer."""

    sends: tuple[Parcel, ...]
    """What leaves, in order for each peer."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A box that stays on the rank. Both windows have the same shape."""

    source_name: str
    """The tensor's name before the switch."""

    target_name: str
    """Its name after the switch."""

    source: Window
    """Where the box lies before."""

    target: Window
    """Where it lies after."""


@dataclass(frozen=True, kw_only=True)
class Itinerary:
    """What one rank does in a switch."""

    sources: Mapping[str, LocalTensor]
    """The tensors that the rank must bring."""

    targets: Mapping[str, LocalTensor]
    """The tensors that it holds afterwards."""

    rounds: tuple[SwitchRound, ...]
    """What it sends and receives."""

    staging_bytes: int
    """Staging memory of a round."""

    aliases: Mapping[str, tuple[str, Window]]
    """Targets that are a run of a source's memory: the source's name and the run, in the target's shape."""

    copies: tuple[Copy, ...]
    """What else stays on the rank."""

    rounds_until: Mapping[str, int]
    """The rounds after which the rank has what it gets of a unit and of those before it, for all units of the model
    in the order of their use."""

    def whole(self, name: str) -> Copy:
        """Return an aliased target as something to copy, for where it has memory of its own."""
        source_name, source = self.aliases[name]
        return Copy(source_name=source_name, target_name=name, source=source, target=_whole(self.targets[name].shape))


def make_itinerary(plan: SwitchPlan, rank: int, sizes: MessageSizes, *, gradients: bool = False) -> Itinerary:
    """Work out what `rank` does to carry out `plan`; see `messages_between` for the arguments."""
    moves_out, moves_in = plan.sends(rank), plan.receives(rank)
    stays = [stay for stay in plan.stays(rank) if moved_dtype(stay.tensor, gradients=gradients) is not None]
    aliases = {} if gradients else {stay.target_name: _alias(stay) for stay in stays if stay.alias_offset is not None}
    outgoing, incoming = (
        {peer: messages_between(moves, sizes, gradients=gradients) for peer, moves in by_peer.items()}
        for by_peer in (moves_out, moves_in)
    )
    rounds, staging_bytes = _rounds(plan.world_size, rank, outgoing, incoming, gradients)
    return Itinerary(
        sources=_locals(plan, (*_flat(moves_out), *stays), of_source=True, gradients=gradients),
        targets=_locals(plan, (*_flat(moves_in), *stays), of_source=False, gradients=gradients),
        rounds=rounds,
        staging_bytes=staging_bytes,
        aliases=aliases,
        copies=tuple(copy for stay in stays if stay.target_name not in aliases for copy in _copies(stay)),
        rounds_until=_rounds_until(plan, rounds, _flat(moves_in)),
    )


def _rounds_until(plan: SwitchPlan, rounds: Iterable[SwitchRound], moves: Iterable[Move]) -> dict[str, int]:
    unit_of = {move.target_name: move.tensor.unit for move in moves}
    found = {planned.tensor.unit: 0 for planned in plan.tensors}
    for number, each in enumerate(rounds, 1):
        for parcel in each.receives:
            for part in parcel.message.parts:
                found[unit_of[part.target_name]] = number
    return dict(zip(found, accumulate(found.values(), max), strict=True))


def _rounds(
    world_size: int,
    rank: int,
    outgoing: Mapping[int, tuple[Message, ...]],
    incoming: Mapping[int, tuple[Message, ...]],
    gradients: bool,
) -> tuple[tuple[SwitchRound, ...], int]:
    """Return the rounds and the largest staging memory that one of them needs."""
    rounds: list[SwitchRound] = []
    largest = 0
    last = max((messages[-1].round for messages in (*outgoing.values(), *incoming.values()) if messages), default=-1)
    for number in range(last + 1):
        staging = _Staging()
        receives, sends = [], []
        for distance in range(1, world_size):
            # Every rank starts with another peer, so that they do not all send to the same one at once.
            source, target = (rank - distance) % world_size, (rank + distance) % world_size
            for message in incoming.get(source, ()):
                if message.round == number:
                    direct = message.lands_directly and not gradients
                    place = None if direct else staging.add(message.nbytes)
                    receives.append(Parcel(peer=source, message=message, staged_at=place))
            for message in outgoing.get(target, ()):
                if message.round == number:
                    place = None if message.leaves_directly else staging.add_packed(message)
                    sends.append(Parcel(peer=target, message=message, staged_at=place))
        rounds.append(SwitchRound(receives=tuple(receives), sends=tuple(sends)))
        largest = max(largest, staging.nbytes)
    return tuple(rounds), largest


class _Staging:
    """Places in the staging memory of one round."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._packed: dict[tuple[object, ...], int] = {}

    def add(self, nbytes: int) -> int:
        """Return the first byte of a new place."""
        place = self.nbytes
        self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return place

    def add_packed(self, message: Message) -> int:
        """Return the place of a message that is packed; peers that get the same bytes share one."""
        content = tuple((part.source_name, part.source) for part in message.parts)
        if content not in self._packed:
            self._packed[content] = self.add(message.nbytes)
        return self._packed[content]


def _locals(
    plan: SwitchPlan, entries: Iterable[Move | Stay], *, of_source: bool, gradients: bool
) -> dict[str, LocalTensor]:
    """Return the tensors at one end of what moves and stays, in the plan's order."""
    found: dict[str, tuple[str, LocalTensor]] = {}
    for entry in entries:
        dtype = moved_dtype(entry.tensor, gradients=gradients)
        if dtype is not None:
            name, shape = (
                (entry.source_name, entry.source_shape) if of_source else (entry.target_name, entry.target_shape)
            )
            found.setdefault(entry.tensor.name, (name, LocalTensor(shape, dtype)))
    order = [planned.tensor.name for planned in plan.tensors]
    return dict(found[name] for name in order if name in found)


def _flat(by_peer: Mapping[int, tuple[Move, ...]]) -> list[Move]:
    return [move for moves in by_peer.values() for move in moves]


def _alias(stay: Stay) -> tuple[str, Window]:
    assert stay.alias_offset is not None
    return stay.source_name, Window(stay.alias_offset, stay.target_shape, tuple(row_major(stay.target_shape)))


def _copies(stay: Stay) -> Iterable[Copy]:
    if stay.alias_offset is not None:
        # One run at both ends, whatever the boxes are.
        yield Copy(
            source_name=stay.source_name,
            target_name=stay.target_name,
            source=_alias(stay)[1],
            target=_whole(stay.target_shape),
        )
        return
    for box in stay.boxes:
        yield Copy(
            source_name=stay.source_name,
            target_name=stay.target_name,
            source=window_of(stay.source_shape, box.source_start, box.shape),
            target=window_of(stay.target_shape, box.target_start, box.shape),
        )


def _whole(shape: tuple[int, ...]) -> Window:
    return window_of(shape, (0,) * len(shape), shape)
