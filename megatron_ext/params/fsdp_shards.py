# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of parameters that torch's FSDP2 (`fully_shard`) has cut along their first axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.params.boxes import Piece
from megatron_ext.params.tensors import ParamsError

__all__ = ["first_row", "is_sharded", "local_part", "number_of_shards", "pieces_of_rows"]


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether FSDP2 has cut a parameter, so that this rank holds some of its rows."""
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def number_of_shards(parameter: torch.Tensor) -> int:
    """Return how many ranks share the rows of a parameter."""
    from torch.distributed.tensor import DTensor

    return int(parameter.device_mesh.size()) if isinstance(parameter, DTensor) else 1


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor of what this rank holds of a parameter, always the same object: rows of it, or all of it.

    `DTensor.to_local()` makes a new one at every call where the parameter requires gradients.
    """
    from torch.distributed.tensor import DTensor

    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def first_row(parameter: torch.Tensor) -> int:
    """Return the first of the rows of a parameter that this rank holds.

    Raises:
        ParamsError: it is cut in another way than by `fully_shard` over one group of ranks.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    if tuple(parameter.placements) != (Shard(0),):
        raise ParamsError(
            f"a parameter of shape {tuple(parameter.shape)} is placed as {tuple(parameter.placements)}; the parameter "
            "view knows fully_shard over one group of ranks, which cuts rows"
        )
    # As torch.chunk: all parts but the last ones are of the size of the first.
    rows, parts = parameter.shape[0], mesh.size()
    return min(rows, -(-rows // parts) * mesh.get_local_rank())


def pieces_of_rows(pieces: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """Return what lies in some rows of a local tensor.

    Args:
        pieces: that tile the local tensor.
        start: the first row.
        stop: one past the last.

    Returns:
        Pieces of the local tensor of those rows alone, in order.
    """
    found = []
    for piece in pieces:
        first, last = piece.local_start[0], piece.local_start[0] + piece.shape[0]
        low, high = max(first, start), min(last, stop)
        if low < high:
            found.append(
                Piece(
                    (piece.global_start[0] + low - first, *piece.global_start[1:]),
                    (low - start, *piece.local_start[1:]),
                    (high - low, *piece.shape[1:]),
                )
            )
    return tuple(found)
