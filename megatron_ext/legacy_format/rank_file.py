# SPDX-License-Identifier: Apache-2.0
"""A file of tensors of one rank, beside those that Megatron writes in its legacy format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_ext.errors import UserError

__all__ = ["read_rank_file", "write_rank_file"]


def write_rank_file(state: Any, path: Path) -> None:
    """Write tensors and what else Megatron writes, in lists and dictionaries.

    Args:
        state: what is written.
        path: of the file; folders on the way are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def read_rank_file(path: Path, what: str, way_out: str) -> Any:
    """Return what `write_rank_file` has written, with tensors on the CPU. No code in the file is run.

    Args:
        path: of the file.
        what: it holds, for messages.
        way_out: what else to do where it cannot be read.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling damaged bytes raises
        raise UserError(
            f"--load: {path}, {what}, cannot be read ({type(error).__name__}); load an earlier checkpoint with "
            f"--ckpt-step, or {way_out}"
        ) from error
