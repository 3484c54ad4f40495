# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which part of a tensor: the view across ranks that a plan needs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.params import GlobalTensor, Placement

__all__ = ["Holders", "Holding"]


@dataclass(frozen=True)
class Holding:
    """How a layout holds a tensor. Tensors with equal holdings lie on the same ranks."""

    parts: int
    """Equal parts that tensor parallelism makes of it; 1 when every rank of a stage holds all of it."""

    is_split: bool
    """Whether tensor parallelism cuts it, be it into one part."""

    stages: tuple[int, ...]
    """Pipeline ranks that hold it: one, or two for a tied embedding."""

    expert_rank: int | None
    """Expert parallel rank that holds it; None for one that belongs to no routed expert."""


class Holders:
    """All ranks of one layout, to be asked about tensors.

    Attributes:
        placement: the model under the layout.
    """

    def __init__(self, placement: Placement) -> None:
        """Note where every rank stands."""
        self.placement = placement
        layout = placement.layout
        self._places = [layout.coordinates(rank) for rank in range(layout.world_size)]

    def holding(self, tensor: GlobalTensor) -> Holding:
        """Return how the layout holds `tensor`."""
        layout = self.placement.layout
        parts = layout.expert_tp if tensor.is_expert else layout.tp
        return Holding(
            parts=1 if tensor.split is None else parts,
            is_split=tensor.split is not None,
            stages=tuple(stage % layout.pp for stage, _ in self.placement.stages_of(tensor)),
            expert_rank=self.placement.expert_rank(tensor),
        )

    def ranks(self, holding: Holding) -> list[tuple[int, ...]]:
        """Return the ranks that hold each part, ascending, one tuple per part."""
        parts: list[list[int]] = [[] for _ in range(holding.parts)]
        is_expert = holding.expert_rank is not None
        for rank, place in enumerate(self._places):
            if place.pp in holding.stages and (not is_expert or place.ep == holding.expert_rank):
                index = place.etp if is_expert else place.tp
                parts[index if holding.is_split else 0].append(rank)
        return [tuple(part) for part in parts]

    def name_on(self, tensor: GlobalTensor, rank: int) -> str:
        """Return the name by which `rank`, one of the tensor's holders, knows it."""
        pipeline_rank, pp = self._places[rank].pp, self.placement.layout.pp
        return next(name for stage, name in self.placement.stages_of(tensor) if stage % pp == pipeline_rank)
