# SPDX-License-Identifier: Apache-2.0
"""Switching the CPU backend on and off."""

from __future__ import annotations

import os
from typing import Any

import torch

from megatron_ext.backends.cpu import (
    compilation,
    cuda_calls,
    device_placement,
    gloo_threads,
    gloo_workers,
    megatron_gaps,
    rng,
    torch_adam,
    uneven_gather,
)
from megatron_ext.patching import Patch, PatchRegistry

__all__ = ["CpuBackend", "available_device_is_cuda", "patches"]


def available_device_is_cuda() -> bool:
    """Return whether this process can train on a GPU, so that the CPU backend stays off."""
    return torch.cuda.is_available()


def patches() -> list[Patch]:
    """Return the patches of the CPU backend that the installed packages call for, in order."""
    records = [
        *compilation.patches(),
        *device_placement.patches(),
        *cuda_calls.patches(),
        *rng.patches(),
        *gloo_workers.patches(),
        *uneven_gather.patches(),
        *megatron_gaps.patches(),
    ]
    if torch_adam.needed():
        records += torch_adam.patches()
    return records


class CpuBackend:
    """Runs Megatron on CPU + gloo while it is active.

    Everything that is an attribute of another package is a `Patch`. The rest is global state of torch and
    logging, which `activate` sets and `deactivate` puts back.
    """

    def __init__(self) -> None:
        self._stance: Any = None

    @property
    def active(self) -> bool:
        """Whether the backend is on."""
        return self._stance is not None

    def activate(self, registry: PatchRegistry) -> None:
        """Apply all patches, compile nothing, and say so on each node's first rank. Does nothing when active.

        Raises:
            PatchError: the installed torch or Megatron does not fit.
        """
        if self.active:
            return
        why = "the CPU was asked for" if available_device_is_cuda() else "no CUDA device was found"
        device_placement.warm_device_tables()
        # To check the other patches is to import Megatron, which meets these.
        first = compilation.patches()
        registry.apply(first)
        try:
            registry.apply([*patches(), megatron_gaps.compile_helpers_patch()])
        except BaseException:  # Ctrl-C too: all patches are there, or none
            registry.revert(patch.name for patch in first)
            raise
        # A stance holds for functions that were decorated before, too, and leaves no trace in them.
        self._stance = torch.compiler.set_stance("force_eager")
        rng.silence_fork_warning()
        gloo_threads.arm()
        # Each node's first rank: one that has lost its GPUs would leave the others waiting for its NCCL.
        rank = os.environ.get("RANK", "0")
        if rank == "0" or os.environ.get("LOCAL_RANK") == "0":
            who = "" if rank == "0" else f"rank {rank}: "
            print(f"> megatron_ext: {who}{why}, training runs on CPU with gloo", flush=True)

    def deactivate(self, registry: PatchRegistry) -> None:
        """Undo `activate`, by identity. Does nothing when not active."""
        if not self.active:
            return
        # First what may fail, so that it can be tried again.
        applied = {patch.name for patch in registry.applied}
        registry.revert(patch.name for patch in patches() if patch.name in applied)
        rng.unsilence_fork_warning()
        gloo_threads.disarm()
        self._stance.__exit__(None, None, None)
        self._stance = None
