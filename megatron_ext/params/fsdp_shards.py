# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of parameters that torch's FSDP2 (`fully_shard`) has cut along their first axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.params.boxes import Piece
from megatron_ext.params.tensors import ParamsError

__all__ = ["first_row", "is_sharded", "local_part", "number_of_shards", "pieces_of_rows", "uneven_rows"]

_NAMED = 3
"""How many tensors an error names."""


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


def uneven_rows(module: torch.nn.Module, *, gated: bool) -> str | None:
    """Return in words which tensors Megatron can neither write nor read, as ranks have unequal rows, and the way out.

    Args:
        module: a model whose parameters FSDP2 has cut, as Megatron wraps it.
        gated: whether the first layers of its MLPs have two halves, each of which is cut.
    """
    uneven: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        halves = 2 if gated and ".linear_fc1." in name else 1
        if parameter.shape and parameter.shape[0] % (halves * number_of_shards(parameter)):
            uneven[name.removeprefix("module.")] = parameter.shape[0]
            ranks = number_of_shards(parameter)
    if not uneven:
        return None
    named = [f"{name} has {rows}" for name, rows in list(uneven.items())[:_NAMED]]
    more = f", and {len(uneven) - _NAMED} more have such numbers" if len(uneven) > _NAMED else ""
    way = (
        f"give --make-vocab-size-divisible-by a multiple of {ranks}"
        if all(name.rpartition(".")[0].endswith(("word_embeddings", "output_layer")) for name in uneven)
        else "choose sizes of the model, and of the vocabulary (--make-vocab-size-divisible-by), that they divide"
    )
    return (
        f"Megatron's checkpoints take tensors whose rows the {ranks} ranks of a model's shards divide evenly"
        f"{' (of both halves of gated MLPs)' if gated else ''}; {', '.join(named)}{more}: {way}"
    )
