# SPDX-License-Identifier: Apache-2.0
"""What is sent inside a worker, beside what crosses workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ext.params.ddp_traffic import ddp_buffers, ddp_bytes

__all__ = ["InsideBytes"]


class InsideBytes:
    """Counts the bytes that this rank's DDP sends inside its worker: gradients, and parameters with their shards.

    Messages of tensor, pipeline and expert parallelism, which are inside a worker too, are not among them.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        """Look at the buffers of DDP; without any, as with FSDP, nothing is told."""
        self._of_step = sum(ddp_bytes(model).values()) if any(True for _ in ddp_buffers(model)) else None
        self._steps = 0

    def count(self, steps: int) -> None:
        """Count steps that were made."""
        self._steps += steps

    def scalars(self) -> dict[str, float]:
        """Return what TensorBoard and wandb get of the steps since they were last written to."""
        steps, self._steps = self._steps, 0
        return {} if self._of_step is None else {"local-sgd/bytes-inside": self._of_step * steps}
