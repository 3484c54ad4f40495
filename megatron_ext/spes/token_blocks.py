# SPDX-License-Identifier: Apache-2.0
"""The order of experts in which those that are trained are neighbours, and those that are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["TokenBlocks"]


@dataclass(frozen=True, kw_only=True)
class TokenBlocks:
    """How the blocks of tokens of a rank's experts, one after the other, are put into two groups and back."""

    groups: tuple[tuple[int, ...], ...]
    """The experts of each group by their number on the rank, ascending. The first group is that of expert 0, so that
    nothing has to be moved where a rank's first or last experts are the trained ones."""

    @classmethod
    def of(cls, trained: Sequence[bool]) -> TokenBlocks:
        """Return the groups of experts that are trained, and of those that are frozen.

        Args:
            trained: of each expert of the rank, whether it is trained.
        """
        first = tuple(expert for expert, is_trained in enumerate(trained) if is_trained == trained[0])
        second = tuple(expert for expert, is_trained in enumerate(trained) if is_trained != trained[0])
        return cls(groups=(first, second) if second else (first,))

    @property
    def order(self) -> tuple[int, ...]:
        """All experts, group by group."""
        return tuple(expert for group in self.groups for expert in group)

    @property
    def is_as_it_was(self) -> bool:
        """Whether nothing has to be moved."""
        return self.order == tuple(range(len(self.order)))

    def arrange(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the blocks group by group.

        Args:
            tensor: any shape whose first dimension is that of tokens, those of expert 0 first.
            counts: how many tokens each expert has, expert 0 first.
        """
        blocks = torch.split(tensor, list(counts))
        return torch.cat([blocks[expert] for expert in self.order])

    def restore(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return what `arrange` has put in order as it was.

        Args:
            tensor: the blocks group by group.
            counts: as for `arrange`: expert 0 first.
        """
        there = torch.split(tensor, [counts[expert] for expert in self.order])
        blocks = dict(zip(self.order, there, strict=True))
        return torch.cat([blocks[expert] for expert in sorted(blocks)])
