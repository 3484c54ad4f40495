# SPDX-License-Identifier: Apache-2.0
"""What workers' inner optimizers are: their class, their settings, and whether they have made steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_ext.local_sgd.agreement import canonical, differences, workers_in_words
from megatron_ext.local_sgd.plain_torch.parameters import local_part
from megatron_ext.outer.digest import tensor_digest

__all__ = ["CLASS", "has_history", "inner_problems", "settings_by_parameter"]

CLASS = "the class of the inner optimizer"

_LEFT_OUT = {
    "params": "compared by name",
    "param_names": "compared by name",
    "lr": "a schedule's, and compared wherever workers meet",
    "foreach": "how a step is computed on a device, not what it does",
    "fused": "how a step is computed on a device, not what it does",
    "capturable": "how a step is computed on a device, not what it does",
    "differentiable": "how a step is computed on a device, not what it does",
}
"""Settings of a parameter group that are not compared, each with the reason; those that end in _lr are a schedule's."""

_PRODIGY = ("d", "d_max", "d_hat", "d_numerator", "d_denom", "numerator_weighted", "gsq_weighted", "sk_l1", "k")
_SCHEDULE_FREE = ("weight_sum", "lr_max", "train_mode")
_LEARNED = {*_PRODIGY, *_SCHEDULE_FREE}
"""What groups of some optimizers (Prodigy and D-Adaptation, schedule-free ones) hold beside settings: what their steps
have learned."""

_WAY_OUT = "give all workers the same inner optimizer, or leave every worker its own (inner_optimizers='own')"


def settings_by_parameter(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]
) -> dict[str, Mapping[str, str]]:
    """Return by parameter its settings in words; an optimizer may list and group parameters in any order.

    Args:
        optimizer: the inner optimizer.
        named: its parameters by name.
    """
    groups: dict[int, Mapping[str, str]] = {}
    for group in optimizer.param_groups:
        settings = {
            name: canonical(_plain(value))
            for name, value in group.items()
            if name not in _LEFT_OUT and name not in _LEARNED and not name.endswith("_lr")
        }
        groups.update((id(parameter), settings) for parameter in group["params"])
    # One object for all parameters of a group, which is sent once.
    return {name: groups.get(id(parameter), {}) for name, parameter in named.items()}


def _plain(value: Any) -> Any:
    """Return a setting in types that are the same on all workers: no tensors in place of numbers, no device's index."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.item()
        digest = tensor_digest([local_part(value)])
        return {"shape": list(value.shape), "digest": digest[1]}
    if isinstance(value, torch.device):
        return value.type
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def inner_problems(classes: Sequence[str], settings: Sequence[Mapping[str, Mapping[str, str]]]) -> list[str]:
    """Return what differs among the workers' inner optimizers; the same on all of them.

    Args:
        classes: every worker's.
        settings: by parameter, every worker's, of the same parameters.
    """
    found = differences([{CLASS: each} for each in classes], workers_in_words, _WAY_OUT)
    if found:
        return found
    for parameter in settings[0]:
        of_parameter = [each[parameter] for each in settings]
        if any(each != of_parameter[0] for each in of_parameter):
            described = [
                {f"{name} of parameter {parameter}": value for name, value in each.items()} for each in of_parameter
            ]
            found += differences(described, workers_in_words, _WAY_OUT)
    return found


def has_history(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a state of earlier steps: more than what some make when they are built."""
    for state in optimizer.state.values():
        if not isinstance(state, Mapping) or ("step" in state and not float(state["step"])):
            continue
        tensors = [value for name, value in state.items() if name != "step" and isinstance(value, torch.Tensor)]
        # Of what FSDP shards this rank's part: not all ranks may ask for the whole.
        if any(bool(local_part(value).any()) for value in tensors):
            return True
    return False
