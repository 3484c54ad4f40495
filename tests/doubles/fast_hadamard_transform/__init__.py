# SPDX-License-Identifier: Apache-2.0
"""A double of fast_hadamard_transform for machines without a GPU, where its kernel cannot run."""

import torch


def hadamard_transform(x, scale=1.0):
    """Return `x` times the Hadamard matrix of its last dimension, a power of two, times a number."""
    size = x.shape[-1]
    assert size & (size - 1) == 0
    matrix = torch.ones(1, 1, device=x.device, dtype=x.dtype)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return scale * (x @ matrix)
