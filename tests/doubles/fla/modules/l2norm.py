# SPDX-License-Identifier: Apache-2.0
"""Vectors of length one."""

import torch


def l2norm(x, eps=1e-6):
    """Return `x` over its length in the last dimension."""
    return (x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(x.dtype)
