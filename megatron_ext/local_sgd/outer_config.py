# SPDX-License-Identifier: Apache-2.0
"""Configuration of the outer optimizer: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ext.local_sgd.options import WITHOUT_FLAG, FromArgs, flag, on_off

__all__ = ["OuterOptimizerConfig"]


# Far above any use: beyond it the first outer step alone may leave the range of fp32, unseen before the next round.
_LARGEST_RATE = 1e3


@dataclass(frozen=True, kw_only=True)
class OuterOptimizerConfig(FromArgs):
    """The optimizer that applies the workers' averaged pseudo-gradient (DiLoCo, arXiv 2311.08105)."""

    outer_optimizer: str = "sgd"
    """Outer optimizer: 'sgd', 'adam', 'adamw', 'none' (plain averaging of the weights), or the import path of
    a torch optimizer class, such as mypackage.optimizers.Lion."""

    outer_optimizer_lr: float | None = flag("--outer-optimizer-lr", None, type=float)
    """Outer learning rate: 0.7 for sgd unless given; all others need one of their own, since theirs mean something
    else (adam moves every weight by about the learning rate)."""

    outer_optimizer_momentum: float = 0.9
    """Momentum of the outer sgd."""

    outer_optimizer_nesterov: bool = on_off("--outer-optimizer-nesterov", True)
    """Nesterov momentum in the outer sgd; no effect when the momentum is 0."""

    outer_optim_class: type[torch.optim.Optimizer] | None = field(default=None, metadata={WITHOUT_FLAG: True})
    """In Python, in place of all of the above: a torch optimizer class."""

    outer_optim_kwargs: dict[str, Any] = field(default_factory=dict, metadata={WITHOUT_FLAG: True})
    """Its arguments."""

    def problems(self) -> list[str]:
        """Return what is wrong with the values by themselves, one sentence each."""
        if self.outer_optim_class is not None or self.outer_optim_kwargs:
            return self._class_problems()
        found = []
        name, rate = self.outer_optimizer, self.outer_optimizer_lr
        if rate is not None and not 0 < rate <= _LARGEST_RATE:
            found.append(f"--outer-optimizer-lr is {rate}; it must be a number above 0 and at most {_LARGEST_RATE:g}")
        if rate is not None and name == "none":
            found.append("--outer-optimizer-lr has no effect with --outer-optimizer none; drop it")
        if rate is None and name != "none" and not self.is_sgd:
            found.append(f"--outer-optimizer {name} needs --outer-optimizer-lr; the default of 0.7 is for sgd only")
        if not 0 <= self.outer_optimizer_momentum < 1:
            found.append(f"--outer-optimizer-momentum is {self.outer_optimizer_momentum}; it must be in [0, 1)")
        elif not self.is_sgd and self.outer_optimizer_momentum != type(self).outer_optimizer_momentum:
            found.append(f"--outer-optimizer-momentum has no effect with --outer-optimizer {name}; drop it")
        if not self.is_sgd and not self.outer_optimizer_nesterov:
            found.append(f"--no-outer-optimizer-nesterov has no effect with --outer-optimizer {name}; drop it")
        return found

    def _class_problems(self) -> list[str]:
        others = dataclasses.replace(self, outer_optim_class=None, outer_optim_kwargs={})
        if self.outer_optim_class is None:
            return ["outer_optim_kwargs has no effect without outer_optim_class; give the class or drop it"]
        if others != OuterOptimizerConfig():
            return ["outer_optim_class replaces the other fields, which then have no effect; put them into its kwargs"]
        return []

    @property
    def name(self) -> str:
        """What it is called: as it was asked for, or by the path of its class."""
        chosen = self.outer_optim_class
        return self.outer_optimizer if chosen is None else f"{chosen.__module__}.{chosen.__qualname__}"

    @property
    def is_sgd(self) -> bool:
        """Whether it is torch's SGD."""
        if self.outer_optim_class is not None:
            return self.outer_optim_class is torch.optim.SGD
        return self.outer_optimizer in ("sgd", "torch.optim.SGD", "torch.optim.sgd.SGD")

    @property
    def learning_rate(self) -> float:
        """The learning rate in force."""
        return 0.7 if self.outer_optimizer_lr is None else self.outer_optimizer_lr
