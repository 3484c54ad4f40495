# SPDX-License-Identifier: Apache-2.0
"""Norms."""

import torch

from transformer_engine.pytorch.base import Module


def normalised(x, weight, bias, *, eps, zero_centered_gamma):
    """LayerNorm with a bias, RMSNorm without one."""
    if zero_centered_gamma:
        weight = weight + 1
    if bias is None:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


class RMSNorm(Module):
    """A weight, which is told whether its gradients are those of parts of the sequence."""

    def __init__(
        self, normalized_shape, eps=1e-5, *, sequence_parallel, zero_centered_gamma=False, params_dtype, device
    ):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(normalized_shape, device=device, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel
        self.bias = None

    def forward(self, x):
        return normalised(x, self.weight, self.bias, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma)


class LayerNorm(RMSNorm):
    """The same with a bias."""

    def __init__(self, *args, sequence_parallel, params_dtype, device, **kwargs):
        super().__init__(
            *args, sequence_parallel=sequence_parallel, params_dtype=params_dtype, device=device, **kwargs
        )
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = sequence_parallel
