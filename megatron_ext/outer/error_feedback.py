# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a lossy message loses of a block of a pseudo-gradient is part of the next one.

As in EF-SGD (arXiv 1901.09847, algorithm 1), with the pseudo-gradient in place of a step: a worker sends the codec's
image of its pseudo-gradient plus its residual, and the new residual is what that image lacks.
"""

from __future__ import annotations

import torch

__all__ = ["lost_in", "wanted_of"]


def wanted_of(
    anchor: torch.Tensor, values: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what should arrive of a block: the pseudo-gradient, and what earlier messages have lost.

    Args:
        anchor: the values that all began the interval with, fp32.
        values: this worker's, in the same shape.
        residual: what earlier messages have lost; None for nothing.
        out: memory for the result, a new tensor by default.
    """
    wanted = torch.sub(anchor, values, out=out)
    return wanted if residual is None else wanted.add_(residual)


def lost_in(wanted: torch.Tensor, arrived: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return what a message has lost, the residual from then on.

    Args:
        wanted: what should have arrived.
        arrived: what the message says, decoded.
        out: memory for the result, which may be `wanted`; a new tensor by default.
    """
    return torch.sub(wanted, arrived, out=out)
