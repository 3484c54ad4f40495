# SPDX-License-Identifier: Apache-2.0
"""Compare our own idea of a rank's tensors with what Megatron's ``sharded_state_dict`` says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.params.boxes import Piece, cut
from megatron_ext.params.fsdp_shards import first_row, is_sharded, local_part, number_of_shards, pieces_of_rows
from megatron_ext.params.parameter_names import checkpoint_key, local_layer, prediction_layer
from megatron_ext.params.placement import Placement
from megatron_ext.params.tensors import GlobalTensor, ParamsError
from megatron_ext.params.view import LocalParameter


@dataclass(frozen=True, order=True)
class CheckedShard:
    """One contiguous box of a checkpointed tensor, as Megatron's ``ShardedTensor`` describes it."""

    key: str
    """Name in the checkpoint."""

    global_shape: tuple[int, ...]
    """Shape in the checkpoint, with axes for layers and experts in front."""

    global_offset: tuple[int, ...]
    """First element of the box."""

    local_shape: tuple[int, ...]
    """Size of the box, without the axes in front."""


def check_chunk(
    chunk: Any,
    placement: Placement,
    entries: Iterable[LocalParameter],
    groups: Any,
    *,
    homogeneous: bool = False,
) -> None:
    """Refuse a model chunk that Megatron would checkpoint in another way than this view describes it.

    Args:
        chunk: the unwrapped model chunk.
        placement: model and layout.
        entries: the chunk's entries.
        groups: process groups; only ``dp_cp`` is used, for the replica numbers that are not compared.
        homogeneous: compare with the form that stacks all layers in one tensor. Models whose layers
            differ are stored layer by layer whatever this says.

    Raises:
        ParamsError: naming the first tensor that differs, with both descriptions.
    """
    metadata = {"dp_cp_group": groups.dp_cp, "non_homogeneous_layers": not homogeneous}
    state = chunk.sharded_state_dict(metadata=metadata)
    homogeneous = (
        homogeneous
        and not isinstance(chunk.config.moe_layer_freq, list)
        and (chunk.config.moe_layer_freq == 1)
    )
    for entry in entries:
        if not _is_described(entry):
            continue
        if entry.name_local not in state:
            raise ParamsError(f"{entry.tensor.name}: {entry.name_local} is missing in sharded_state_dict")
        layer, prediction = local_layer(entry.name_local), prediction_layer(entry.name_local)
        path = prediction if layer is None else f"decoder.layers.{layer}"
        renamed: Mapping[str, str] = {}
        if path is not None:
            renamed = chunk.get_submodule(path).submodules_config.sharded_state_dict_keys_map
        ours = expected_shards(placement, entry, renamed, homogeneous=homogeneous)
        theirs = _shards_of(state[entry.name_local])
        if ours != theirs:
            raise ParamsError(
                f"{entry.tensor.name}: this view and sharded_state_dict disagree about "
                f"{entry.name_local}: {ours} against {theirs}"
            )
        # Blocks with names of their own could lie in any order in the tensor: only the parameter tells.
        told = getattr(entry.parameter, "partition_sizes", None)
        if told is not None and list(told) != (blocks := _blocks_of_rows(entry)):
            raise ParamsError(
                f"{entry.tensor.name}: {entry.name_local} has blocks of {list(told)} rows, expected {blocks}"
            )


def expected_shards(
    placement: Placement, entry: LocalParameter, renamed: Mapping[str, str], *, homogeneous: bool
) -> list[CheckedShard]:
    """What ``sharded_state_dict`` should say about one tensor.

    Args:
        placement: model and layout.
        entry: the tensor.
        renamed: the layer's table of renamed prefixes.
        homogeneous: whether all layers are stacked in one tensor.

    Returns:
        One shard per piece of the tensor's slice, sorted.
    """
    tensor = entry.tensor
    leading_shape: list[int] = []
    leading_offset: list[int] = []
    if homogeneous and tensor.layer is not None:
        leading_shape.append(placement.shape.num_layers)
        leading_offset.append(tensor.layer)
    if tensor.expert is not None:
        leading_shape.append(placement.shape.num_moe_experts or 0)
        leading_offset.append(tensor.expert)
    if entry.is_tied_copy:
        key = tensor.name
    else:
        key = checkpoint_key(
            entry.name_local, first_layer=_first_layer(entry), homogeneous=homogeneous, renamed=renamed
        )
    shards = []
    for piece in _stored_pieces(entry):
        name, shape, start = _stored_tensor(tensor, piece)
        shards.append(
            CheckedShard(key + name, (*leading_shape, *shape), (*leading_offset, *start), piece.shape)
        )
    return sorted(shards)


def _stored_tensor(tensor: GlobalTensor, piece: Piece) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return what a piece is stored in: what its key has added, the shape, and where the piece begins there.

    That is the tensor, or the piece's block where checkpoints keep the blocks as tensors of their own.
    """
    split = tensor.split
    if split is None or not split.names:
        return "", tensor.shape, piece.global_start
    axis, first = split.axis, 0
    for name, size in zip(split.names, split.blocks, strict=True):
        if piece.global_start[axis] < first + size:
            shape, start = list(tensor.shape), list(piece.global_start)
            shape[axis], start[axis] = size, start[axis] - first
            return f".{name}", tuple(shape), tuple(start)
        first += size
    raise AssertionError(f"{tensor.name}: no block holds the piece at {piece.global_start}")


def _first_layer(entry: LocalParameter) -> int:
    layer = local_layer(entry.name_local)
    return 0 if layer is None or entry.tensor.layer is None else entry.tensor.layer - layer


def _stored_pieces(entry: LocalParameter) -> tuple[Piece, ...]:
    """The slice's pieces, but one per block: a gated fc1 on a single rank is one piece here, two there.

    Of a parameter that FSDP2 has cut, what lies in this rank's rows.
    """
    tensor = entry.tensor
    pieces = entry.slice.pieces
    if tensor.split is not None and len(pieces) != len(tensor.split.blocks):
        pieces = cut(tensor.name, tensor.shape, tensor.split, 0, 1).pieces
    if not is_sharded(entry.parameter):
        return pieces
    start = first_row(entry.parameter)
    return pieces_of_rows(pieces, start, start + local_part(entry.parameter).shape[0])


def _is_described(entry: LocalParameter) -> bool:
    """Return whether Megatron can say where the rows lie that FSDP2 gives a rank: with equal parts of each block."""
    rows, parts = entry.parameter.shape[:1].numel(), number_of_shards(entry.parameter)
    return parts == 1 or (rows % parts == 0 and all(block % (rows // parts) == 0 for block in _blocks_of_rows(entry)))


def _blocks_of_rows(entry: LocalParameter) -> list[int]:
    """Return how many rows of a rank's tensor-parallel part belong to each block of the tensor."""
    split = entry.tensor.split
    if split is None or split.axis != 0:
        return []
    whole, held = entry.tensor.shape[0], entry.slice.local_shape[0]
    return [block * held // whole for block in split.blocks]


def _shards_of(state: Any) -> list[CheckedShard]:
    # A factory cuts its tensor (gate and up projection) into shards only when it is asked to.
    tensors = state.build() if hasattr(state, "build") else [state]
    return sorted(
        CheckedShard(tensor.key, tuple(tensor.global_shape), tuple(tensor.global_offset), tuple(tensor.local_shape))
        for tensor in tensors
    )
