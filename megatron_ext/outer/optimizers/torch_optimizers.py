# SPDX-License-Identifier: Apache-2.0
"""Torch's optimizers as outer optimizers, Adam's among them, and those that others have written for torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from megatron_ext.errors import UserError
from megatron_ext.outer.optimizers.base import TAKEN, OuterOptimizer, like
from megatron_ext.outer.optimizers.sgd import OuterSGD

__all__ = ["OuterAdam", "OuterAdamW", "TorchOuter", "imported", "made_with", "of_torch"]


def imported(name: str, flag: str, choices: str) -> type[torch.optim.Optimizer]:
    """Return the torch optimizer class at an import path.

    Args:
        name: the path.
        flag: the option that holds it.
        choices: what to give instead.

    Raises:
        UserError: there is none.
    """
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


class TorchOuter(OuterOptimizer):
    """A torch optimizer, which is given each anchor as a parameter of its own."""

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

    def change(self, options: Mapping[str, float]) -> None:
        """Give the optimizer's group other values."""
        for group in self._optimizer.param_groups:
            group.update(options)

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

    def load(self, tensors: dict[str, list[torch.Tensor]], scalars: dict[str, float]) -> None:
        """Give the optimizer copies of the states."""
        for index, anchor in enumerate(self._anchors):
            for name, number in self._numbers.items():
                if name not in tensors or bool(tensors[name][index].isnan().all()):
                    continue
                value = tensors[name][index]
                if number is None:
                    self._optimizer.state[anchor][name] = like(anchor).copy_(value)
                elif isinstance(number, torch.Tensor):
                    self._optimizer.state[anchor][name] = torch.tensor(float(value[0]), dtype=number.dtype)
                else:
                    self._optimizer.state[anchor][name] = type(number)(float(value[0]))


class OuterAdam(TorchOuter):
    """Adam."""

    name = "adam"

    def __init__(self, anchors: Sequence[torch.Tensor], *, lr: float) -> None:
        # The inner optimizer decays the weights already; decaying the anchor again would count it twice.
        arguments = {"lr": lr, "weight_decay": 0.0}
        super().__init__(anchors, *made_with(torch.optim.Adam, arguments, anchors, "--outer-optimizer 'adam'"))


class OuterAdamW(TorchOuter):
    """AdamW, whose decay of the weights is left to the inner optimizer, as with Adam."""

    name = "adamw"

    def __init__(self, anchors: Sequence[torch.Tensor], *, lr: float) -> None:
        arguments = {"lr": lr, "weight_decay": 0.0}
        super().__init__(anchors, *made_with(torch.optim.AdamW, arguments, anchors, "--outer-optimizer 'adamw'"))


def of_torch(kind: type[Any], said: str) -> type[OuterOptimizer]:
    """Return the class of an outer optimizer, of torch's with its learning rate alone; another one as it is.

    Args:
        kind: a class of an outer optimizer, or of torch's.
        said: how it was asked for, for messages.
    """
    if kind is torch.optim.SGD:
        return OuterSGD
    if not issubclass(kind, torch.optim.Optimizer):
        return cast("type[OuterOptimizer]", kind)

    class OfTorch(TorchOuter):
        def __init__(self, anchors: Sequence[torch.Tensor], *, lr: float) -> None:
            super().__init__(anchors, *made_with(kind, {"lr": lr}, anchors, said))

    return OfTorch


def made_with(
    chosen: Callable[..., torch.optim.Optimizer], arguments: dict[str, Any], anchors: Sequence[torch.Tensor], said: str
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """Return an optimizer over anchors, and what it keeps of a parameter, as `TorchOuter` takes them.

    Raises:
        UserError: it refuses its arguments, or keeps what no checkpoint can hold.
    """
    # A rank whose shard is empty owns nothing; torch's optimizers insist on a parameter.
    parameters = list(anchors) or [torch.empty(0)]
    probe = torch.zeros(3)
    try:
        tried, optimizer = chosen([probe], **arguments), chosen(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{said} refused {arguments}: {error}") from error
    return optimizer, _states_of(tried, probe, said)


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
        if name in TAKEN:
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
