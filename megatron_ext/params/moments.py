# SPDX-License-Identifier: Apache-2.0
"""An optimizer's moments after non-finite gradients."""

from __future__ import annotations

import torch

from megatron_ext.params.fsdp_shards import local_part

__all__ = ["reset_non_finite_moments"]


@torch.no_grad()
def reset_non_finite_moments(optimizer: torch.optim.Optimizer) -> None:
    """Set the non-finite elements of an optimizer's state to zero."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                local_part(value).nan_to_num_(0.0, 0.0, 0.0)
