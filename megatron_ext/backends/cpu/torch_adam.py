# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer's checkpoints when torch's AdamW stands in for the fused one.

Without Transformer Engine and Apex, Megatron 0.19 cannot resume: it asserts on an AdamW that has not stepped
yet, loses the step count while loading, and gives all parameters one shared step tensor, which then counts
every parameter's update.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.patching import Patch

__all__ = ["needed", "patches"]

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_PLACEHOLDER = "step of an optimizer without state"


def needed() -> bool:
    """Return whether Megatron uses torch's AdamW, that is, found neither Transformer Engine nor Apex."""
    try:
        module = importlib.import_module(_OPTIMIZER.partition(":")[0])
    except ImportError:  # the gates of the patches say so
        return True
    return not getattr(module, "HAVE_APEX_OR_TE", False)


def patches() -> tuple[Patch, ...]:
    """Return the records of this module, always the same objects."""
    return _PATCHES


def _state_dict_before_first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if self.is_stub_optimizer or len(self.optimizer.state) > 0:
            return original(self)
        # The original reads one common step out of the states; what it returns holds no state itself.
        self.optimizer.state[_PLACEHOLDER] = {"step": torch.tensor(0.0)}
        try:
            return original(self)
        finally:
            del self.optimizer.state[_PLACEHOLDER]

    return state_dict


def _load_with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        if self.ddp_config.use_megatron_fsdp:
            return
        step = float(state_dict["optimizer"]["param_groups"][0]["step"])
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step)

    return load_state_dict


def _keep_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # What is not a tensor is left as it stands; the step comes from the parameter groups.
        original(self, model_param, {**tensors, "step": None})

    return set_states


_PATCHES = (
    Patch(
        name="cpu/adam-unstepped",
        target=f"{_OPTIMIZER}.state_dict",
        wrap=_state_dict_before_first_step,
        reason="Without TE and Apex the state dict of an optimizer that has not stepped fails an assertion.",
    ),
    Patch(
        name="cpu/adam-load",
        target=f"{_OPTIMIZER}.load_state_dict",
        wrap=_load_with_own_steps,
        reason="Without TE and Apex all parameters share one step tensor after loading.",
        parameters=("state_dict",),
    ),
    Patch(
        name="cpu/adam-step",
        target=f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        wrap=_keep_step,
        reason="Without TE and Apex loading a shard overwrites the step, or fails where the shard has none.",
        parameters=("model_param", "tensors"),
    ),
)
