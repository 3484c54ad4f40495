# SPDX-License-Identifier: Apache-2.0
"""The places in Megatron itself that assume a GPU, or a source checkout, and cannot run without one."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_ext.backends.cpu.device_placement import TORCH_VERSIONS, names_cuda
from megatron_ext.patching import Patch
from megatron_ext.seams import latent_attention, norms

__all__ = ["compile_helpers_patch", "patches"]


def compile_helpers_patch() -> Patch:
    """Return the patch that a wheel install needs on any device."""
    return _COMPILE_HELPERS


def patches() -> tuple[Patch, ...]:
    """Return the other records of this module, always the same objects."""
    return _PATCHES


def _compile_unless_shipped(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        datasets = importlib.import_module("megatron.core.datasets")
        has_makefile = any((Path(folder) / "Makefile").exists() for folder in datasets.__path__)
        if not has_makefile and _imports("megatron.core.datasets.helpers_cpp"):
            return
        original()

    return compile_helpers


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if args:
            return original(True, *args[1:], **kwargs)
        return original(**{**kwargs, "allow_no_cuda": True})

    return initialize_megatron


def _newest_architecture(original: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(original)
    def get_device_arch_version() -> int:
        return 10

    return get_device_arch_version


def _move_from_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.detach().numpy()
        return tensor

    return maybe_move_tensor_to_cpu


def _mesh_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(group, "cpu" if names_cuda(device_type) else device_type, *args, **kwargs)

    return from_group


def _queue_without_script(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> Any:
        script = sys.modules["__main__"]
        # A spawned process imports the file of this module, which here has none.
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return original(*args, **kwargs)
        finally:
            sys.modules["__main__"] = script

    return get_write_results_queue


_COMPILE_HELPERS = Patch(
    name="wheel/compile-helpers",
    target="megatron.core.datasets.utils:compile_helpers",
    wrap=_compile_unless_shipped,
    reason="The wheel ships the compiled helpers without their Makefile, so `make` fails and ends the run.",
)

_PATCHES = (
    Patch(
        name="cpu/allow-no-cuda",
        target="megatron.training.initialize:initialize_megatron",
        wrap=_allow_no_cuda,
        reason="Start-up asserts that CUDA is available unless told otherwise, which pretrain never does.",
        parameters=("allow_no_cuda",),
    ),
    Patch(
        name="cpu/architecture",
        target="megatron.training.utils.common_utils:get_device_arch_version",
        wrap=_newest_architecture,
        reason="Older GPUs need CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism; a CPU has no queues.",
    ),
    *norms.patches(),
    *latent_attention.patches(),
    Patch(
        name="cpu/moe-split-sizes",
        target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        wrap=_move_from_cpu,
        reason="Split sizes of the all-to-all are turned into numpy arrays only when they come from a GPU.",
        parameters=("tensor", "as_numpy", "record_stream"),
    ),
    Patch(
        name="cpu/device-mesh",
        target="torch.distributed.device_mesh:DeviceMesh.from_group",
        wrap=_mesh_on_cpu,
        reason="Megatron shards with torch's FSDP2 (--use-torch-fsdp2) over a mesh of CUDA devices.",
        parameters=("group", "device_type"),
        versions=TORCH_VERSIONS,
        distribution="torch",
    ),
    Patch(
        name="cpu/checkpoint-queue",
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
        wrap=_queue_without_script,
        reason="At a rank's first save the process of the writers' queue imports the script and all of Megatron, which "
        "it has no use for, on the cores that train.",
        parameters=("mp_mode",),
    ),
)
