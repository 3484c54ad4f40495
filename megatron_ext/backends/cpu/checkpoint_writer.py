# SPDX-License-Identifier: Apache-2.0
"""The writer of asynchronous checkpoints on CPU: a process of its own, in which Megatron picks a CUDA device."""

from __future__ import annotations

from typing import Any

from megatron_ext.async_save import WriterLoops, mcore_loop, nvrx_loop
from megatron_ext.backends.cpu import cuda_calls, device_placement
from megatron_ext.patching import PatchRegistry

__all__ = ["LOOPS", "mcore_loop_on_cpu", "nvrx_loop_on_cpu"]


def mcore_loop_on_cpu(*args: Any) -> None:
    """Run Megatron's own writer where there is no CUDA device."""
    _be_on_cpu()
    mcore_loop(*args)


def nvrx_loop_on_cpu(*args: Any) -> None:
    """Run the writer of NVIDIA's resiliency extension where there is no CUDA device."""
    _be_on_cpu()
    nvrx_loop(*args)


def _be_on_cpu() -> None:
    """Let this process, which writes and does nothing else, take the CPU for its device."""
    device_placement.warm_device_tables()
    PatchRegistry().apply([*device_placement.patches(), *cuda_calls.patches()])


LOOPS = WriterLoops(mcore=mcore_loop_on_cpu, nvrx=nvrx_loop_on_cpu)
