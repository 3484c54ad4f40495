# SPDX-License-Identifier: Apache-2.0
"""Building the outer optimizer, and reading and writing its state in a form that a checkpoint can hold."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import OuterOptimizerConfig

__all__ = ["build_outer_optimizer", "load_state", "resolve_class", "scalar_state", "tensor_state"]

_BUILT_IN: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def resolve_class(name: str) -> type[torch.optim.Optimizer] | None:
    """Return the optimizer class that `name` stands for, None for 'none'.

    Raises:
        UserError: the name is neither built in nor the import path of a torch optimizer class.
    """
    if name == "none":
        return None
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module_name, _, class_name = name.rpartition(".")
    choices = f"use one of {', '.join([*_BUILT_IN, 'none'])} or the import path of a torch optimizer class"
    if not module_name:
        raise UserError(f"--outer-optimizer {name!r} is not known; {choices}")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--outer-optimizer {name!r} cannot be imported ({error}); {choices}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"--outer-optimizer {name!r} is not a torch.optim.Optimizer class; {choices}")
    return found


def build_outer_optimizer(
    config: OuterOptimizerConfig, anchors: list[torch.Tensor]
) -> torch.optim.Optimizer | None:
    """Return the outer optimizer over `anchors`, or None for plain averaging.

    Args:
        config: which optimizer and its hyperparameters. sgd gets learning rate, momentum and Nesterov, every
            other class the learning rate and its own defaults; adam and adamw decay no weights.
        anchors: fp32 tensors of any shapes, without gradients.

    Raises:
        UserError: the class cannot be found, or refuses its arguments.
    """
    chosen = resolve_class(config.outer_optimizer)
    if chosen is None:
        return None
    arguments: dict[str, Any] = {"lr": config.outer_optimizer_lr}
    if chosen is torch.optim.SGD:
        arguments["momentum"] = config.outer_optimizer_momentum
        arguments["nesterov"] = config.outer_optimizer_nesterov and config.outer_optimizer_momentum > 0
    elif chosen in _BUILT_IN.values():
        # The inner optimizer decays the weights already; decaying the anchor again would count it twice.
        arguments["weight_decay"] = 0.0
    if not anchors:
        # A rank without parameters of its own (its shard is empty) takes part in rounds and steps nothing.
        return None
    try:
        return chosen(anchors, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--outer-optimizer {config.outer_optimizer!r} refused {arguments}: {error}"
        ) from error


def tensor_state(
    optimizer: torch.optim.Optimizer | None, anchors: list[torch.Tensor]
) -> dict[str, list[torch.Tensor]]:
    """Return the optimizer's per-anchor tensors by name, each list in the order of `anchors`.

    Raises:
        UserError: a state tensor has another shape than its anchor, so that no checkpoint format can hold it.
    """
    found: dict[str, list[torch.Tensor]] = {}
    if optimizer is None:
        return found
    for anchor in anchors:
        for name, value in optimizer.state.get(anchor, {}).items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            if value.shape != anchor.shape:
                raise UserError(
                    f"--outer-optimizer {type(optimizer).__name__} keeps a state {name!r} of shape "
                    f"{tuple(value.shape)} for a parameter of shape {tuple(anchor.shape)}, which checkpoints "
                    "cannot hold; choose an optimizer whose states have the shape of their parameter"
                )
            found.setdefault(name, []).append(value)
    return found


def scalar_state(optimizer: torch.optim.Optimizer | None, anchors: list[torch.Tensor]) -> dict[str, float]:
    """Return the optimizer's scalar states (such as Adam's step), which all anchors share."""
    if optimizer is None or not anchors:
        return {}
    state = optimizer.state.get(anchors[0], {})
    return {
        name: float(value)
        for name, value in state.items()
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)
    }


def load_state(
    optimizer: torch.optim.Optimizer | None,
    anchors: list[torch.Tensor],
    tensors: dict[str, list[torch.Tensor]],
    scalars: dict[str, float],
) -> None:
    """Give the optimizer the states that `tensor_state` and `scalar_state` returned earlier."""
    if optimizer is None:
        return
    for index, anchor in enumerate(anchors):
        state = optimizer.state[anchor]
        for name, values in tensors.items():
            state[name] = values[index]
        for name, value in scalars.items():
            state[name] = torch.tensor(value, dtype=torch.float32)
