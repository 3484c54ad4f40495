# SPDX-License-Identifier: Apache-2.0
"""What can be chosen of a simulated run with hot switching. Without torch, which no help needs."""

from typing import Literal

__all__ = ["Kernels", "Recomputing"]

Kernels = Literal["documents", "rows", "fused-rows"]
"""Of attention: one fused call for a document; Megatron's unfused one over a row; one fused call for a row, in which
documents see each other, as in HotSPa's artifact (in no run of ours)."""

Recomputing = Literal["needed", "none", "selective", "full"]
"""What is computed again: no more than a strategy needs to fit, or the same in all."""
