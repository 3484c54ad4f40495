# SPDX-License-Identifier: Apache-2.0
"""Whether workers have equal weights, by their digest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.outer.digest import tensor_digest

__all__ = ["equal_across", "require_equal"]


def equal_across(tensors: Iterable[torch.Tensor], group: Any, device: torch.device | None = None) -> bool:
    """Return whether `tensors` are equal, bit for bit as far as the digest sees, on all ranks of `group`."""
    mine = torch.tensor(tensor_digest(tensors), dtype=torch.int64, device=device)
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return bool(torch.equal(lowest, highest))


def require_equal(named: Sequence[tuple[str, torch.Tensor]], group: Any, device: torch.device | None = None) -> None:
    """Check that tensors, given with their names, are equal on all ranks of `group`, which continue from them together.

    Raises:
        RuntimeError: they are not, with the name of the first that differs.
    """
    if equal_across((tensor for _, tensor in named), group, device):
        return
    differs = next(name for name, tensor in named if not equal_across([tensor], group, device))
    raise RuntimeError(
        f"the workers' weights differ where the anchor is to be taken, first in {differs}; they must start equal "
        "(check --data-parallel-random-init and any code of your own that changes weights per rank)"
    )
