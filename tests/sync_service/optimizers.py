# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers of users."""

from typing import Any

import torch

__all__ = ["Fragile"]


class Fragile(torch.optim.SGD):
    """SGD that fails with a learning rate of one half when it meets a large value."""

    def step(self, closure: Any = None) -> Any:
        """Make a step, or fail."""
        (group,) = self.param_groups
        if group["lr"] == 0.5 and any(one.grad is not None and one.grad.abs().max() > 50 for one in group["params"]):
            raise ZeroDivisionError("one half")
        return super().step(closure)
