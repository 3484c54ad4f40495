# SPDX-License-Identifier: Apache-2.0
"""Memory that is used again."""

from __future__ import annotations

import threading

import torch

__all__ = ["ReusedMemory"]


class ReusedMemory:
    """Memory that each thread uses again and again: fresh memory costs more than what is read into it."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def __call__(self, use: str, count: int) -> torch.Tensor:
        """Return this many fp32 values for one use, as this thread's last one has left them."""
        held: dict[str, torch.Tensor] = self._of_thread.__dict__
        if use not in held or held[use].numel() < count:
            held[use] = torch.empty(count, dtype=torch.float32)
        return held[use][:count]

    def give_up(self) -> None:
        """Give up this thread's."""
        self._of_thread.__dict__.clear()
