# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron on CPU + gloo: a backend to learn, test and debug with."""

from megatron_ext.backends.cpu import checkpoint_writer
from megatron_ext.backends.cpu.backend import CpuBackend, available_device_is_cuda, patches
from megatron_ext.backends.cpu.device_placement import TORCH_VERSIONS
from megatron_ext.backends.cpu.megatron_gaps import compile_helpers_patch
from megatron_ext.backends.cpu.options import problems, set_argument_defaults

__all__ = [
    "TORCH_VERSIONS",
    "CpuBackend",
    "available_device_is_cuda",
    "checkpoint_writer",
    "compile_helpers_patch",
    "patches",
    "problems",
    "set_argument_defaults",
]
