# SPDX-License-Identifier: Apache-2.0
"""The outer optimizer that a configuration asks for, and why it cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.optimizers.all_optimizers import OPTIMIZERS
from megatron_ext.outer.optimizers.base import OuterOptimizer
from megatron_ext.outer.optimizers.sgd import OuterSGD
from megatron_ext.outer.optimizers.torch_optimizers import TorchOuter, imported, made_with
from megatron_ext.outer.places import Where, refusal
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = ["averages_values", "build_outer_optimizer", "outer_optimizer_problems", "outer_states_per_anchor"]


def outer_optimizer_problems(config: OuterOptimizerConfig, place: Where = Where.JOB) -> list[str]:
    """Return why the outer optimizer cannot be used, as far as two steps on a small tensor show it.

    Args:
        config: which optimizer.
        place: where the rounds are made.
    """
    problems = config.problems()
    if problems:
        return problems
    if config.outer_optim_class is None:
        problems = refusal("--outer-optimizer", OPTIMIZERS, config.outer_optimizer, config.kind, place)
    if place is Where.ASYNCHRONOUS:
        problems += [
            f"--outer-optimizer-{option}-schedule counts rounds of all together, and in {place.value} each is of one "
            "contribution; drop it"
            for option in config.schedules
        ]
    try:
        tried = build_outer_optimizer(config, [torch.zeros(3)])
        for _ in range(2):
            tried.step(0, slice(0, 3), torch.ones(3))
        tried.tensor_state()
    except UserError as error:
        return [*problems, str(error)]
    except Exception as error:  # the user's class may raise anything; better now than at the first round
        flag = "--outer-optimizer" if config.outer_optim_class is None else "--outer-optim-class"
        return [
            *problems,
            f"{flag} {config.name!r} cannot make a step: {type(error).__name__}: {error}; fix its arguments, or "
            "choose another optimizer",
        ]
    return problems


def averages_values(config: OuterOptimizerConfig, reducing: GTAConfig) -> bool:
    """Return whether the next anchor is the mean of the workers' values itself: no outer optimizer, and the mean.

    The anchor minus the common pseudo-gradient would be the same except for rounding; one worker gets back its values.
    """
    return config.is_average and reducing.is_mean


def outer_states_per_anchor(config: OuterOptimizerConfig) -> int:
    """Return how many tensors of its shape the optimizer keeps of an anchor, as a step on a small one shows it."""
    tried = build_outer_optimizer(config, [torch.zeros(2)])
    tried.step(0, slice(0, 2), torch.ones(2))
    return len(tried.states(0))


def build_outer_optimizer(config: OuterOptimizerConfig, anchors: Sequence[torch.Tensor]) -> OuterOptimizer:
    """Return the outer optimizer over `anchors`.

    Args:
        config: which optimizer and its hyperparameters. Each gets those that its class names; one of torch's the
            learning rate and its own defaults; adam and adamw decay no weights.
        anchors: 1-D fp32 tensors without gradients.

    Raises:
        UserError: the class cannot be found, or refuses its arguments.
    """
    given = config.outer_optim_class
    if given is None:
        return config.kind(anchors, **config.arguments)
    if isinstance(given, str):
        given = imported(given, "--outer-optim-class", "give the import path of a torch optimizer class")
    arguments: dict[str, Any] = config.outer_optim_kwargs
    # Also for ours: torch's own checks its arguments.
    made = made_with(given, arguments, anchors, f"--outer-optim-class {given.__name__}")
    if given is torch.optim.SGD and arguments.keys() <= {"lr", "momentum", "nesterov"}:
        return OuterSGD(anchors, **{"lr": 1e-3, **arguments})
    return TorchOuter(anchors, *made)
