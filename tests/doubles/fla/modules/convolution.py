# SPDX-License-Identifier: Apache-2.0
"""The causal convolution before attention."""

import torch


def causal_conv1d(x, weight, bias=None, activation=None, **_unused):
    """Return `x` (batch, positions, channels) with each channel convolved with the positions before, and no state."""
    padded = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    found = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0]).transpose(1, 2)
    return torch.nn.functional.silu(found) if activation in ("silu", "swish") else found, None
