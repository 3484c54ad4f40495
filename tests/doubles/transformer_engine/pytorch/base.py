# SPDX-License-Identifier: Apache-2.0
"""What the modules have in common."""

import contextlib

import torch


class Module(torch.nn.Module):
    """Has an extra state, which is empty without FP8, and is told when weights are new."""

    fp8 = fp8_calibration = False

    def __init__(self):
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state is None or state.numel() == 0

    def set_tensor_parallel_group(self, tp_group):
        self.tp_group = tp_group


def initialised(module, shape, *, init_method, get_rng_state_tracker, rng_tracker_name, device, dtype):
    """Return a parameter that is drawn like a tensor-parallel one: from the tracker's generator."""
    parameter = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    name = () if rng_tracker_name is None else (rng_tracker_name,)
    fork = contextlib.nullcontext() if get_rng_state_tracker is None else get_rng_state_tracker().fork(*name)
    with fork, torch.no_grad():
        init_method(parameter)
    return parameter


def mark_split(parameter, dim):
    """Mark a tensor-parallel parameter."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
