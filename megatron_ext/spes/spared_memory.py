# SPDX-License-Identifier: Apache-2.0
"""How much memory a peer spares by training its own experts only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.spes.ownership import Ownership

__all__ = ["TrainingBytes", "training_bytes"]


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """Bytes that a model takes up in training, over all ranks that share one copy of it."""

    weights: int
    """The model's weights, all of them."""

    gradients: int
    """Gradient buffers of what is trained."""

    optimizer: int
    """Adam's two moments of what is trained, and fp32 masters where the weights are of another type."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


def training_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    ownership: Ownership | None = None,
    peer: int = 0,
    *,
    weight_bytes: int = 2,
    gradient_bytes: int = 4,
) -> TrainingBytes:
    """Return the bytes that a peer needs.

    Ranks that hold copies (data parallelism without the distributed optimizer) need it once each.

    Args:
        shapes: shapes of all parameters by their global names.
        ownership: who trains what; everything is trained unless given.
        peer: id of the peer.
        weight_bytes: per weight; 4 is fp32, which then needs no masters.
        gradient_bytes: per gradient; 4 is Megatron's with bf16 weights (`--accumulate-allreduce-grads-in-fp32`).
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    trained = sum(size for name, size in sizes.items() if ownership is None or ownership.is_trained(name, peer))
    per_state = 8 if weight_bytes == 4 else 12
    return TrainingBytes(
        weights=weight_bytes * sum(sizes.values()),
        gradients=gradient_bytes * trained,
        optimizer=per_state * trained,
    )
