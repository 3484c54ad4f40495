# SPDX-License-Identifier: Apache-2.0
"""What an optimizer remembers of gradients that were not finite."""

from __future__ import annotations

import torch

__all__ = ["reset_broken_moments"]


@torch.no_grad()
def reset_broken_moments(optimizer: torch.optim.Optimizer) -> None:
    """Set to zero what is not finite in an optimizer's state."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.nan_to_num_(0.0, 0.0, 0.0)
