# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: which positions of every row a rank has.

Megatron cuts a row into twice as many parts as there are ranks, and gives rank r part r and, counted from the end,
part r: so all ranks have as much causal attention to compute.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Part", "gather_rows", "own_positions", "row_parts"]

Part = tuple[int, int]
"""First position of a row, and the one after the last."""


def row_parts(own: int, group: Any) -> list[Part]:
    """Return the parts of a row that this rank has, ascending.

    Args:
        own: positions that it has.
        group: process group of the ranks that share a row.
    """
    ranks, rank = group.size(), group.rank()
    if ranks == 1:
        return [(0, own)]
    size = own // 2
    return [(part * size, (part + 1) * size) for part in (rank, 2 * ranks - 1 - rank)]


def own_positions(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return this rank's positions of whole rows.

    Args:
        tensor: (rows, positions).
        group: as for `row_parts`.
    """
    if group.size() == 1:
        return tensor
    parts = row_parts(tensor.shape[1] // group.size(), group)
    return torch.cat([tensor[:, first:last] for first, last in parts], dim=1)


def gather_rows(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return whole rows, to which gradients of all ranks come back.

    Args:
        own: this rank's positions, (positions, ...).
        group: as for `row_parts`.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    ranks = group.size()
    if ranks == 1:
        return own
    gathered = gather_from_sequence_parallel_region(own.contiguous(), tensor_parallel_output_grad=True, group=group)
    firsts_and_lasts = gathered.unflatten(0, (ranks, 2, own.shape[0] // 2)).unbind(1)
    return torch.cat([firsts_and_lasts[0].flatten(0, 1), firsts_and_lasts[1].flip(0).flatten(0, 1)])
