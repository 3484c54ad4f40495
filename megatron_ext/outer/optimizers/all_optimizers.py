# SPDX-License-Identifier: Apache-2.0
"""The outer optimizers by name, and those of torch by their import path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ext.errors import UserError
from megatron_ext.plugins import Registry

if TYPE_CHECKING:
    from megatron_ext.outer.optimizers.base import OuterOptimizer

__all__ = ["OPTIMIZERS", "find_optimizer"]

# By name, so that a list of them imports nothing.
_OWN = {
    "sgd": "megatron_ext.outer.optimizers.sgd:OuterSGD",
    "adam": "megatron_ext.outer.optimizers.torch_optimizers:OuterAdam",
    "adamw": "megatron_ext.outer.optimizers.torch_optimizers:OuterAdamW",
    "none": "megatron_ext.outer.optimizers.sgd:OuterAverage",
}


def _problems(name: str, kind: Any) -> list[str]:
    from megatron_ext.outer.optimizers.optimizer_checks import optimizer_problems

    return optimizer_problems(name, kind)


OPTIMIZERS: Registry[Any] = Registry("outer optimizer", "megatron_ext.outer_optimizers", _OWN, _problems)
"""Other packages add theirs, or optimizers written for torch, under the entry-point group
`megatron_ext.outer_optimizers`."""


def find_optimizer(name: str) -> type[OuterOptimizer]:
    """Return the class of an outer optimizer.

    Raises:
        UserError: the name is neither known nor the import path of a torch optimizer class.
    """
    if name in _OWN:  # of which a server makes one per block
        found: type[OuterOptimizer] = OPTIMIZERS.find(name)
        return found
    # Late, like what the names stand for: a list of names does not need torch.
    from megatron_ext.outer.optimizers.torch_optimizers import imported, of_torch

    if name in OPTIMIZERS.names():
        return of_torch(OPTIMIZERS.find(name), f"--outer-optimizer {name!r}")
    choices = f"use one of {', '.join(OPTIMIZERS.names())} or the import path of a torch optimizer class"
    if "." not in name:
        raise UserError(f"--outer-optimizer {name!r} is not known; {choices}")
    return of_torch(imported(name, "--outer-optimizer", choices), f"--outer-optimizer {name!r}")
