# SPDX-License-Identifier: Apache-2.0
"""The outer optimizer: moving the anchors, and its state in a form that a checkpoint can hold."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron_ext.errors import UserError
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = [
    "OuterOptimizer",
    "OuterSGD",
    "TorchOuter",
    "averages_values",
    "build_outer_optimizer",
    "outer_optimizer_problems",
    "outer_states_per_anchor",
    "resolve_class",
]

# Names that local SGD and Megatron's formats give their own tensors next to an outer optimizer's.
_TAKEN = frozenset({"anchor", "replica", "late", "residual", "update", "param", "fp32_param", "padding"})
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
    return _imported(
        name,
        "--outer-optimizer",
        f"use one of {', '.join([*_BUILT_IN, 'none'])} or the import path of a torch optimizer class",
    )


def _imported(name: str, flag: str, choices: str) -> type[torch.optim.Optimizer]:
    """Return the torch optimizer class at an import path."""
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        raise UserError(f"{flag} {name!r} is not known; {choices}")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # the user's module may raise anything
        raise UserError(f"{flag} {name!r} cannot be imported ({error}); {choices}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"{flag} {name!r} is not a torch.optim.Optimizer class; {choices}")
    return found


def outer_optimizer_problems(config: OuterOptimizerConfig) -> list[str]:
    """Return why the outer optimizer cannot be used, as far as two steps on a small tensor show it."""
    problems = config.problems()
    try:
        if resolve_class(config.outer_optimizer) is None or problems:
            return problems
        tried = build_outer_optimizer(config, [torch.zeros(3)])
        for _ in range(2):
            tried.step(0, slice(0, 3), torch.ones(3))
        tried.tensor_state()
    except UserError as error:
        # What an optimizer that there is not would need is of no interest.
        return [*(problem for problem in problems if "needs --outer-optimizer-lr" not in problem), str(error)]
    except Exception as error:  # the user's class may raise anything; better now than at the first round
        flag = "--outer-optimizer" if config.outer_optim_class is None else "--outer-optim-class"
        return [
            f"{flag} {config.name!r} cannot make a step: {type(error).__name__}: {error}; fix its arguments, or "
            "choose another optimizer"
        ]
    return []


class OuterOptimizer(Protocol):
    """What moves the anchors that a rank owns by their pseudo-gradients."""

    elementwise: bool
    """Whether `step` may be given an anchor range by range."""

    def step(self, index: int, part: slice, gradient: torch.Tensor) -> None:
        """Move elements `part` of anchor `index`.

        Args:
            index: which anchor.
            part: of its elements; all of them unless `elementwise`.
            gradient: fp32, as long as the part; may be used up.
        """

    def momentum(self, index: int, part: slice) -> torch.Tensor | None:
        """Return elements `part` of what anchor `index` has of earlier pseudo-gradients; None without such a state."""

    def states(self, index: int) -> list[torch.Tensor]:
        """Return what there is of states with the shape of anchor `index`, the tensors themselves."""

    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Return the states that have the shape of their anchor, by name, each list in the order of the anchors."""

    def scalar_state(self) -> dict[str, float]:
        """Return the states that all anchors share, such as Adam's step."""

    def load(self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, float]) -> None:
        """Take over what `tensor_state` and `scalar_state` returned, into memory of its own."""


class OuterSGD:
    """Stochastic gradient descent with (Nesterov) momentum, in place and element by element.

    The same operations in the same order as `torch.optim.SGD`, bit for bit, but on any range of an anchor: on a
    processor the outer step is bound by memory, and works on what is in the cache.
    """

    elementwise = True

    def __init__(
        self, anchors: Sequence[torch.Tensor], *, lr: float, momentum: float = 0.0, nesterov: bool = False
    ) -> None:
        self._anchors = anchors
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov
        self._buffers = [_like(anchor).zero_() for anchor in anchors] if momentum else []

    def step(self, index: int, part: slice, gradient: torch.Tensor) -> None:
        """Do v <- momentum v + g; anchor <- anchor - lr (g + momentum v), or - lr v without Nesterov."""
        if self._momentum:
            buffer = self._buffers[index][part].mul_(self._momentum).add_(gradient)
            gradient = gradient.add_(buffer, alpha=self._momentum) if self._nesterov else buffer
        self._anchors[index][part].add_(gradient, alpha=-self._lr)

    def momentum(self, index: int, part: slice) -> torch.Tensor | None:
        """Return the momentum."""
        return self._buffers[index][part] if self._momentum else None

    def states(self, index: int) -> list[torch.Tensor]:
        """Return the momentum of an anchor."""
        return [self._buffers[index]] if self._momentum else []

    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Return the momentum under torch's name for it."""
        return {"momentum_buffer": self._buffers} if self._momentum else {}

    def scalar_state(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def load(self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, float]) -> None:
        """Take over the momentum; without one, start from rest."""
        if self._momentum and "momentum_buffer" in tensors:
            for buffer, loaded in zip(self._buffers, tensors["momentum_buffer"], strict=True):
                buffer.copy_(loaded)


class TorchOuter:
    """A torch optimizer, which is given each anchor as a parameter of its own."""

    elementwise = False

    def __init__(
        self, anchors: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, numbers: dict[str, Any]
    ) -> None:
        """Prepare.

        Args:
            anchors: the optimizer's parameters.
            optimizer: over all of them, in one group.
            numbers: by name the states that it keeps of a parameter: None for one of the parameter's shape, else a
                number, or a tensor with one, of the kind that it is.
        """
        self._anchors = anchors
        self._optimizer = optimizer
        self._numbers = numbers

    def step(self, index: int, part: slice, gradient: torch.Tensor) -> None:
        """Let the optimizer see a gradient for this anchor alone."""
        anchor = self._anchors[index]
        anchor.grad = gradient
        self._optimizer.step()
        anchor.grad = None

    def momentum(self, index: int, part: slice) -> torch.Tensor | None:
        """Return what torch's optimizers call momentum_buffer or exp_avg."""
        state = self._optimizer.state.get(self._anchors[index], {})
        found = state.get("momentum_buffer", state.get("exp_avg"))
        return found[part] if isinstance(found, torch.Tensor) and found.dim() == 1 else None

    def states(self, index: int) -> list[torch.Tensor]:
        """Return the states of an anchor that are more than one number; none before its first step."""
        state = self._optimizer.state.get(self._anchors[index], {})
        return [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]

    def tensor_state(self) -> dict[str, list[torch.Tensor]]:
        """Return the optimizer's states; a number of an anchor, such as Adam's step, as a tensor of its shape.

        An anchor that no round has moved yet has none, while others may: its states are NaN.
        """
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self._numbers}
        for anchor in self._anchors:
            state = self._optimizer.state.get(anchor, {})
            for name, values in found.items():
                value = state.get(name, math.nan)
                is_whole = isinstance(value, torch.Tensor) and value.dim() > 0
                values.append(value if is_whole else torch.full_like(anchor, float(value)))
        return found

    def scalar_state(self) -> dict[str, float]:
        """Return nothing: anchors may have made different numbers of steps."""
        return {}

    def load(self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, float]) -> None:
        """Give the optimizer copies of the states."""
        for index, anchor in enumerate(self._anchors):
            for name, number in self._numbers.items():
                if name not in tensors or bool(tensors[name][index].isnan().all()):
                    continue
                value = tensors[name][index]
                if number is None:
                    self._optimizer.state[anchor][name] = _like(anchor).copy_(value)
                elif isinstance(number, torch.Tensor):
                    self._optimizer.state[anchor][name] = torch.tensor(float(value[0]), dtype=number.dtype)
                else:
                    self._optimizer.state[anchor][name] = type(number)(float(value[0]))


def _like(anchor: torch.Tensor) -> torch.Tensor:
    """Return new memory like an anchor's, pinned if that is."""
    return torch.empty_like(anchor, pin_memory=anchor.is_pinned())


def averages_values(config: OuterOptimizerConfig, reducing: GTAConfig) -> bool:
    """Return whether the next anchor is the mean of the workers' values itself: no outer optimizer, and the mean.

    The anchor minus the common pseudo-gradient would be the same except for rounding; one worker gets back its values.
    """
    return config.name == "none" and reducing.is_mean


def outer_states_per_anchor(config: OuterOptimizerConfig) -> int:
    """Return how many tensors of its shape the optimizer keeps of an anchor, as a step on a small one shows it."""
    tried = build_outer_optimizer(config, [torch.zeros(2)])
    tried.step(0, slice(0, 2), torch.ones(2))
    return len(tried.states(0))


def build_outer_optimizer(config: OuterOptimizerConfig, anchors: Sequence[torch.Tensor]) -> OuterOptimizer:
    """Return the outer optimizer over `anchors`.

    Args:
        config: which optimizer and its hyperparameters. sgd gets learning rate, momentum and Nesterov, every
            other class the learning rate and its own defaults; adam and adamw decay no weights.
        anchors: 1-D fp32 tensors without gradients.

    Raises:
        UserError: the class cannot be found, or refuses its arguments.
    """
    given = config.outer_optim_class
    if given is not None:
        if isinstance(given, str):
            given = _imported(given, "--outer-optim-class", "give the import path of a torch optimizer class")
        return _build_class(given, config.outer_optim_kwargs, anchors)
    chosen = resolve_class(config.outer_optimizer)
    if chosen is None:
        return OuterSGD(anchors, lr=1.0)
    if chosen is torch.optim.SGD:
        return OuterSGD(
            anchors,
            lr=config.learning_rate,
            momentum=config.outer_optimizer_momentum,
            nesterov=config.outer_optimizer_nesterov,
        )
    arguments: dict[str, Any] = {"lr": config.learning_rate}
    if chosen in _BUILT_IN.values():
        # The inner optimizer decays the weights already; decaying the anchor again would count it twice.
        arguments["weight_decay"] = 0.0
    return _build_torch(chosen, arguments, anchors, f"--outer-optimizer {config.outer_optimizer!r}")


def _build_class(
    chosen: type[torch.optim.Optimizer], arguments: dict[str, Any], anchors: Sequence[torch.Tensor]
) -> OuterOptimizer:
    """Return an optimizer that was given as a class and its arguments."""
    said = f"--outer-optim-class {chosen.__name__}"
    # Also for ours: torch's own checks its arguments.
    found = _build_torch(chosen, arguments, anchors, said)
    if chosen is torch.optim.SGD and arguments.keys() <= {"lr", "momentum", "nesterov"}:
        return OuterSGD(anchors, **{"lr": 1e-3, **arguments})
    return found


def _build_torch(
    chosen: Callable[..., torch.optim.Optimizer], arguments: dict[str, Any], anchors: Sequence[torch.Tensor], said: str
) -> OuterOptimizer:
    # A rank whose shard is empty owns nothing; torch's optimizers insist on a parameter.
    parameters = list(anchors) or [torch.empty(0)]
    probe = torch.zeros(3)
    try:
        tried, optimizer = chosen([probe], **arguments), chosen(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{said} refused {arguments}: {error}") from error
    return TorchOuter(anchors, optimizer, _states_of(tried, probe, said))


def _states_of(optimizer: torch.optim.Optimizer, probe: torch.Tensor, said: str) -> dict[str, Any]:
    """Return what an optimizer keeps of a parameter, as `TorchOuter` takes it.

    Raises:
        UserError: no checkpoint can hold that, or it keeps something of all parameters together, although each is
            moved by itself.
    """
    way_out = (
        "choose an optimizer that keeps numbers, and fp32 tensors of a parameter's shape, for each parameter alone"
    )
    before = _settings(optimizer)
    for _ in range(2):
        probe.grad = torch.ones_like(probe)
        optimizer.step()
    changed = sorted(name for name, value in _settings(optimizer).items() if before.get(name) != value)
    if changed:
        raise UserError(
            f"{said} keeps {', '.join(changed)} for all parameters together, which checkpoints cannot hold; {way_out}"
        )
    found: dict[str, Any] = {}
    for name, value in optimizer.state.get(probe, {}).items():
        if name in _TAKEN:
            raise UserError(
                f"{said} calls a state {name!r}, which is the name of something else in checkpoints; rename it there"
            )
        if isinstance(value, torch.Tensor) and value.dim():
            if value.dtype != torch.float32:
                raise UserError(
                    f"{said} keeps a state {name!r} of {value.dtype}, which checkpoints cannot hold; {way_out}"
                )
            if value.shape != probe.shape:
                raise UserError(
                    f"{said} keeps a state {name!r} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(probe.shape)}, which checkpoints cannot hold; {way_out}"
                )
            found[name] = None
        elif isinstance(value, (int, float, torch.Tensor)):
            found[name] = value
        elif value is not None:
            raise UserError(
                f"{said} keeps a state {name!r} that is a {type(value).__name__}, which checkpoints cannot hold; "
                f"{way_out}"
            )
    return found


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the settings of an optimizer's one group."""
    return {name: repr(value) for name, value in optimizer.param_groups[0].items() if name != "params"}
