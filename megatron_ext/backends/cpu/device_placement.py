# SPDX-License-Identifier: Apache-2.0
"""Tensors that Megatron wants on `cuda` are made, or stay, on the CPU.

The functions that take a device are wrapped one by one. A `TorchFunctionMode` would do the same with less
code, but it costs time on every tensor operation and is blind in other threads (checkpoint writers).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.patching import Patch

__all__ = ["TORCH_VERSIONS", "names_cuda", "patches", "warm_device_tables"]

TORCH_VERSIONS = ">=2.6"
"""Releases of torch whose gloo has all collectives that Megatron calls (reduce-scatter, coalescing, bf16)."""

_CPU = torch.device("cpu")

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)


def names_cuda(device: Any) -> bool:
    """Return whether `device` (string, `torch.device`, index, None) means a CUDA device."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def warm_device_tables() -> None:
    """Let torch fill its table of device-taking functions while those are still its own.

    `with torch.device("meta")` finds the functions by identity in a table that is built at first use.
    """
    from torch.utils._device import _device_constructors

    _device_constructors()


def patches() -> tuple[Patch, ...]:
    """Return the records of this module, always the same objects."""
    return _PATCHES


def _factory_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and names_cuda(device):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return factory


def _stay(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return cuda


def _to_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and names_cuda(args[0]):
            args = (_CPU, *args[1:])
        elif names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(self, *args, **kwargs)

    return to


def _cuda_type_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and result.startswith("torch.") and not result.startswith("torch.cuda."):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron."):
                return "torch.cuda." + result.removeprefix("torch.")
        return result

    return type_


def _no_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def record_stream(self: Any, stream: Any) -> None:
        return None

    return record_stream


def _unpinned(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        original(self, *args, **kwargs)

    return init


def _torch(attribute: str, wrap: Callable[[Any], Any], reason: str) -> Patch:
    return Patch(
        name=f"cpu/torch.{attribute}",
        target=f"torch:{attribute}",
        wrap=wrap,
        reason=reason,
        versions=TORCH_VERSIONS,
        distribution="torch",
    )


_PATCHES = (
    *(
        _torch(name, _factory_on_cpu, "Megatron creates tensors on 'cuda' or for copies to it; they are plain ones.")
        for name in _FACTORIES
    ),
    _torch("Tensor.cuda", _stay, "Megatron moves tensors and modules to the GPU; they stay where they are."),
    _torch("Tensor.to", _to_on_cpu, "Megatron moves tensors to 'cuda'; they stay on the CPU."),
    _torch("Tensor.record_stream", _no_stream, "There are no streams whose use of a tensor could be recorded."),
    _torch(
        "Tensor.type",
        _cuda_type_names,
        "Megatron's optimizers recognise parameters by type names such as 'torch.cuda.FloatTensor'; only "
        "callers inside Megatron get that name.",
    ),
    Patch(
        name="cpu/loader-pinning",
        target="torch.utils.data.dataloader:DataLoader.__init__",
        wrap=_unpinned,
        reason="Megatron's loaders pin memory for copies to a GPU; without one torch warns at every loader.",
        parameters=("pin_memory",),
        versions=TORCH_VERSIONS,
        distribution="torch",
    ),
)
