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
        assert parallel_mode in (None, "column", "row")
        self.parallel_mode, self.use_bias, self.return_bias = parallel_mode, bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
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

    def times(self, x, weight):
        """Multiply; the weight's gradient may be added to those of other micro-batches where they are."""
        return _Accumulated.apply(x, weight) if self.fuse_wgrad_accumulation else torch.nn.functional.linear(x, weight)

    def make_bias(self, out_features):
        """Return zeros, which are no parameter without a bias."""
        if not self.use_bias:
            return torch.empty(0, **self._where)
        return torch.nn.Parameter(torch.zeros(out_features, **self._where))


class _Accumulated(torch.autograd.Function):
    """A product whose weight's gradient goes to `main_grad`; what autograd gets in its place has no meaning."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        (x, weight), parameter = ctx.saved_tensors, ctx.parameter
        instead = None
        if weight.requires_grad:
            found = gradient.flatten(0, -2).T @ x.flatten(0, -2)
            parameter.main_grad.add_(found.to(parameter.main_grad.dtype))
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True
                zero = getattr(parameter, "zero_out_wgrad", False)
                instead = torch.full_like(weight, 0.0 if zero else torch.nan)
        return gradient @ weight, instead


def mark_split(parameter, dim):
    """Mark a tensor-parallel parameter."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
