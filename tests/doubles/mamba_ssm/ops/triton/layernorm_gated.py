# SPDX-License-Identifier: Apache-2.0
"""The norm behind the state-space product."""

import torch


class RMSNorm(torch.nn.Module):
    """RMSNorm of each group of channels, with one weight a channel; the gate has been applied before."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x):
        groups = x.unflatten(-1, (-1, self.group_size)).float()
        scaled = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return scaled.flatten(-2).to(x.dtype) * self.weight
