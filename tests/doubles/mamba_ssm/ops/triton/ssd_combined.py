# SPDX-License-Identifier: Apache-2.0
"""The causal convolution and the state-space product, as one quadratic product over the sequence."""

import torch
from torch.nn import functional


def mamba_chunk_scan_combined(*args, **kwargs):
    """What only inference calls."""
    raise NotImplementedError("the double of mamba_ssm trains only")


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    *,
    activation,
    headdim,
    ngroups,
    norm_before_gate,
    seq_idx=None,
    state_dtype=None,
):
    """Return the gated outputs [batch, length, heads * headdim] of the projected inputs z, x, B, C and dt.

    With h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t the output is C_t h_t + D x_t, times silu(z_t).
    """
    if seq_idx is not None or activation != "silu" or norm_before_gate:
        raise NotImplementedError("the double of mamba_ssm knows whole rows, silu, and the gate before the norm")
    heads, width = dt_bias.numel(), conv1d_weight.shape[-1]
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    channels = xbc.transpose(1, 2)
    mixed = functional.conv1d(
        channels, conv1d_weight.unsqueeze(1), conv1d_bias, padding=width - 1, groups=channels.shape[1]
    )
    mixed = functional.silu(mixed[..., : channels.shape[-1]].transpose(1, 2))
    rest = (conv1d_weight.shape[0] - inner) // 2
    x, b, c = mixed.split([inner, rest, rest], dim=-1)
    x = x.unflatten(-1, (heads, headdim)).float()
    b, c = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2).float() for part in (b, c))
    dt = functional.softplus(dt.float() + dt_bias)
    decay = (dt * A).cumsum(1)
    between = decay.unsqueeze(2) - decay.unsqueeze(1)  # of the positions (t, s), by batch and head
    causal = torch.ones(between.shape[1:3], dtype=torch.bool, device=between.device).tril()[None, :, :, None]
    weights = torch.where(causal, between, -torch.inf).exp() * torch.einsum("bthn,bshn->btsh", c, b)
    y = torch.einsum("btsh,bsh,bshp->bthp", weights, dt, x) + D.float().unsqueeze(-1) * x
    return y.flatten(-2).to(zxbcdt.dtype) * functional.silu(z)
