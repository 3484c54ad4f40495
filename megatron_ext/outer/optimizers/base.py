# SPDX-License-Identifier: Apache-2.0
"""What an outer optimizer is: it moves anchors in place, and its state has a form that a checkpoint can hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from megatron_ext.outer.places import Where

__all__ = ["OPTIONS", "TAKEN", "OuterOptimizer", "like"]

OPTIONS = ("lr", "momentum", "nesterov")
"""With which of the options of the command line an outer optimizer may be made: `--outer-optimizer-lr` and so on."""

TAKEN = frozenset({"anchor", "exact", "replica", "late", "residual", "update", "param", "fp32_param", "padding"})
"""Names that local SGD, servers and Megatron's formats give their own tensors next to an outer optimizer's."""


class OuterOptimizer(ABC):
    """What moves the anchors that a rank owns by their pseudo-gradients. Each anchor is moved by itself."""

    name: ClassVar[str]
    """What it is called where it is asked for."""

    options: ClassVar[tuple[str, ...]] = ("lr",)
    """Those of `OPTIONS` that mean something with it; it is made with them, by their names."""

    default_lr: ClassVar[float | None] = None
    """The learning rate unless one is given; None where one has to be."""

    is_average: ClassVar[bool] = False
    """Whether a step takes the mean of the workers' values, so that rounds may put that in the place of the anchor."""

    elementwise: bool = False
    """Whether `step` may be given an anchor range by range: then less memory is needed, and it is faster."""

    refused_in: ClassVar[Mapping[Where, str]] = {
        Where.ASYNCHRONOUS: "contributions come one by one there, for which it has no form"
    }
    """The places where it does not work, each with the reason. One that works in all has `of_contributions`."""

    def __init__(self, anchors: Sequence[torch.Tensor], **options: Any) -> None:
        """Take what is moved.

        Args:
            anchors: 1-D fp32 tensors; may be none.
            options: the values of those that the class names.
        """
        self._anchors = anchors

    @classmethod
    def of_contributions(cls, anchors: Sequence[torch.Tensor], *, count: int, **options: Any) -> OuterOptimizer:
        """Return the form of it for asynchronous rounds, whose steps are by one contribution each.

        Args:
            anchors: 1-D fp32 tensors.
            count: how many contributions make up one step; each counts 1/count.
            options: as its class is made with.
        """
        raise NotImplementedError(f"{cls.__name__} has no form for single contributions")

    @abstractmethod
    def step(self, index: int, part: slice, gradient: torch.Tensor) -> None:
        """Move elements `part` of anchor `index`, in place.

        Args:
            index: which anchor.
            part: of its elements; all of them unless `elementwise`.
            gradient: fp32, as long as the part; may be used up.
        """

    def change(self, options: Mapping[str, float]) -> None:
        """Make the steps from now on with other values of some of `options`; the states stay.

        An optimizer that has it can follow schedules. It is made with the largest momentum of those to come.

        Args:
            options: the new values by name: "lr" or "momentum".
        """
        raise NotImplementedError(f"{type(self).__name__} cannot change")

    @classmethod
    def follows_schedules(cls) -> bool:
        """Return whether it has `change`."""
        return cls.change is not OuterOptimizer.change

    def momentum(self, index: int, part: slice) -> torch.Tensor | None:
        """Return elements `part` of what anchor `index` has of earlier pseudo-gradients; None without such a state."""
        return None

    @abstractmethod
    def states(self, index: int) -> list[torch.Tensor]:
        """Return what there is of states with the shape of anchor `index`, the tensors themselves."""

    @abstractmethod
    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Return the states that have the shape of their anchor, by name, each list in the order of the anchors."""

    def scalar_state(self) -> dict[str, float]:
        """Return the states that all anchors share, such as a number of steps."""
        return {}

    @abstractmethod
    def load(self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, float]) -> None:
        """Take over what `tensor_state` and `scalar_state` returned, into memory of its own.

        Before the first step of a tensor there is nothing of it; what is not there starts from rest.
        """


def like(anchor: torch.Tensor) -> torch.Tensor:
    """Return new memory like an anchor's, pinned if that is."""
    return torch.empty_like(anchor, pin_memory=anchor.is_pinned())
