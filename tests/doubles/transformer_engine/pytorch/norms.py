# SPDX-License-Identifier: Apache-2.0
"""Norms."""

import torch

from transformer_engine.pytorch.base import Module


def norm_parameters(size, *, has_bias, sequence_parallel, zero_centered_gamma, params_dtype, device):
    """Return weight, and bias or None; they are told whether their gradients are those of parts of the sequence."""
    start = torch.zeros if zero_centered_gamma else torch.ones
    weight = torch.nn.Parameter(start(size, device=device, dtype=params_dtype))
    bias = torch.nn.Parameter(torch.zeros_like(weight)) if has_bias else None
    for parameter in (weight, bias) if has_bias else (weight,):
        parameter.sequence_parallel = sequence_parallel
    return weight, bias


def normalised(x, weight, bias, *, eps, zero_centered_gamma):
    """LayerNorm with a bias, RMSNorm without one."""
    if zero_centered_gamma:
        weight = weight + 1
    if bias is None:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


class RMSNorm(Module):
    """A weight."""

    has_bias = False

    def __init__(self, normalized_shape, eps=1e-5, *, zero_centered_gamma=False, **parameters):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight, self.bias = norm_parameters(
            normalized_shape, has_bias=self.has_bias, zero_centered_gamma=zero_centered_gamma, **parameters
        )

    def forward(self, x):
        return normalised(x, self.weight, self.bias, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma)


class LayerNorm(RMSNorm):
    """The same with a bias."""

    has_bias = True
