# SPDX-License-Identifier: Apache-2.0
"""The recurrence of Gated DeltaNet."""

import torch


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, **_unused):
    """Return the outputs (batch, positions, heads, channels of a value), and no state.

    S(t) = exp(g) S(t-1) + beta k (v - exp(g) S(t-1) k), o = S(t) q: equation 10 of the paper.
    """
    kept = v.dtype
    q, k, v, g, beta = (part.float() for part in (q, k, v, g, beta))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    state, found = q.new_zeros(*q.shape[:1], q.shape[2], k.shape[-1], v.shape[-1]), []
    for position in range(q.shape[1]):
        key, query = k[:, position, :, :, None], q[:, position, :, :, None]
        state = state * g[:, position, :, None, None].exp()
        change = v[:, position] - (state * key).sum(-2)
        state = state + beta[:, position, :, None, None] * key * change[..., None, :]
        found.append((state * query).sum(-2))
    return torch.stack(found, 1).to(kept), None
