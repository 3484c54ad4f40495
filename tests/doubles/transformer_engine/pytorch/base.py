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


class WithWeights(Module):
    """A module that draws its weights like tensor-parallel ones: from the tracker's generator."""

    def __init__(
        self,
        *,
        parallel_mode=None,
        tp_group=None,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        device="cuda",
        fuse_wgrad_accumulation=False,
    ):
        super().__init__()
        assert not fuse_wgrad_accumulation, "the double does not fuse the accumulation of gradients"
        assert parallel_mode in (None, "column", "row")
        self.parallel_mode, self.use_bias, self.return_bias = parallel_mode, bias, return_bias
        self.set_tensor_parallel_group(tp_group)
        self._tracker, self._tracked = get_rng_state_tracker, () if rng_tracker_name is None else (rng_tracker_name,)
        self._init_method, self._where = init_method, {"device": device, "dtype": params_dtype}

    def draw_weight(self, out_features, in_features):
        weight = torch.nn.Parameter(torch.empty(out_features, in_features, **self._where))
        fork = contextlib.nullcontext() if self._tracker is None else self._tracker().fork(*self._tracked)
        with fork, torch.no_grad():
            self._init_method(weight)
        mark_split(weight, 1 if self.parallel_mode == "row" else 0)
        return weight

    def make_bias(self, out_features):
        """Return zeros, which are no parameter without a bias."""
        if not self.use_bias:
            return torch.empty(0, **self._where)
        return torch.nn.Parameter(torch.zeros(out_features, **self._where))


def mark_split(parameter, dim):
    """Mark a tensor-parallel parameter."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
