# SPDX-License-Identifier: Apache-2.0
"""What Megatron has dumped (`--save-params-interval` and its like)."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["assert_same", "dumps", "iterations"]


def dumps(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor that was dumped into a folder, by file, chunk and name."""
    return {
        f"{path.relative_to(folder)}/{chunk}/{name}": value
        for path in sorted(folder.rglob("*.pth"))
        for chunk, tensors in torch.load(path).items()
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor)
    }


def iterations(folder: Path) -> set[tuple[str, str]]:
    """Return of what and of which iteration there are dumps."""
    return {(path.parts[-3], path.parts[-2]) for path in folder.rglob("*.pth")}


def assert_same(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Check that two folders have the same tensors, to the last bit."""
    assert ours.keys() == others.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, others[name])] == []
