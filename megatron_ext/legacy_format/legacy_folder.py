# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint in the legacy format is told from others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["RANK_FILE", "is_legacy", "rank_folders"]

RANK_FILE = "model_optim_rng.pt"
"""What Megatron writes into every rank's folder."""


def rank_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of ranks, in no order, whether their files are there or not.

    Args:
        folder: of one iteration.
    """
    return folder.glob("mp_rank_*")


def is_legacy(folder: Path) -> bool:
    """Return whether a folder is an iteration in the legacy format, damaged or not."""
    return any(rank_folders(folder))
