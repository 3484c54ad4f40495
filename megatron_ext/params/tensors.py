# SPDX-License-Identifier: Apache-2.0
"""Global tensors: what a model is made of, before anybody cuts it into shards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_ext.errors import UserError

EMBEDDING_UNIT = "embedding"
FINAL_NORM_UNIT = "final_norm"
OUTPUT_UNIT = "output_layer"


class ParamsError(UserError):
    """A model, a layout or a tensor does not fit the global parameter view."""


def require_sizes(what: str, owner: object, fields: Iterable[str]) -> None:
    """Refuse sizes below 1; one that is None is not there.

    Args:
        what: they are of, for the message.
        owner: has them as attributes.
        fields: their names.

    Raises:
        ParamsError: naming the first one.
    """
    for field in fields:
        size = getattr(owner, field)
        if size is not None and size < 1:
            raise ParamsError(f"{what}: {field} must be at least 1, got {size}")


def layer_unit(layer: int) -> str:
    """Name of the unit that holds everything of decoder layer ``layer`` (counted from 0)."""
    return f"layer.{layer}"


def prediction_unit(depth: int) -> str:
    """Name of the unit that holds everything of a layer of multi-token prediction (counted from 0)."""
    return f"mtp_layer.{depth}"


@dataclass(frozen=True, kw_only=True)
class Split:
    """How tensor parallelism cuts one axis.

    The axis is a row of blocks; every block is cut evenly over the ranks, and a rank stores its part of
    each block one after the other. A plain column or row split has one block. The fused gate and up
    projection of a gated MLP has two: cutting it as one block would pair gate rows with foreign up rows.
    """

    axis: int
    """Axis of the global tensor that is cut."""

    blocks: tuple[int, ...]
    """Block sizes along the axis, in elements; their sum is the axis' size."""

    names: tuple[str, ...] = ()
    """Under which name Megatron's checkpoints keep each block as a tensor of its own; empty where they keep one."""


@dataclass(frozen=True, kw_only=True)
class GlobalTensor:
    """One tensor of the whole model, independent of any parallel layout and of the layer implementation."""

    name: str
    """Global name, e.g. ``decoder.layers.7.mlp.experts.3.linear_fc1.weight``. Layer and expert numbers
    are global and count from 0."""

    shape: tuple[int, ...]
    """Global shape. The vocabulary axis is padded (see ``valid_rows``)."""

    dtype: torch.dtype
    """Type of the model's copy of the tensor (an optimizer may hold a wider one)."""

    unit: str
    """What a layer-wise algorithm treats as one: ``embedding``, ``layer.<i>``, ``mtp_layer.<i>``,
    ``final_norm`` or ``output_layer``."""

    layer: int | None = None
    """Global decoder layer, None outside the decoder layers."""

    expert: int | None = None
    """Global expert, None for everything that is not part of a routed expert."""

    split: Split | None = None
    """How tensor parallelism cuts it; None when every rank of the group holds all of it."""

    shared_with: tuple[str, ...] = ()
    """The names of its copies on the last stage: ``output_layer.weight`` of a tied embedding, its own with
    multi-token prediction."""

    valid_rows: int | None = None
    """Rows before the vocabulary padding; None when no row is padding."""

    kind: Literal["parameter", "buffer"] = "parameter"
    """``buffer`` for persistent state that no optimizer trains (the router's expert bias)."""

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to a routed expert, hence to the expert parallel groups."""
        return self.expert is not None

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return math.prod(self.shape)


def repad_rows(value: torch.Tensor, tensor: GlobalTensor, rows: int) -> torch.Tensor:
    """Give a vocabulary tensor another amount of padding.

    The padded size depends on the tensor parallel size, so two layouts may disagree about it.

    Args:
        value: the tensor's full value, shape ``tensor.shape``.
        tensor: which tensor it is; ``valid_rows`` says where its padding starts.
        rows: wanted size of axis 0.

    Returns:
        ``value`` itself when nothing changes, else a new tensor of ``rows`` rows whose added rows are zero.

    Raises:
        ParamsError: when rows that are not padding would be cut off.
    """
    valid = value.shape[0] if tensor.valid_rows is None else tensor.valid_rows
    if rows < valid:
        raise ParamsError(f"{tensor.name}: {rows} rows cannot hold the {valid} rows of the vocabulary")
    if rows == value.shape[0]:
        return value
    padded = value.new_zeros((rows, *value.shape[1:]))
    kept = min(rows, value.shape[0])
    padded[:kept] = value[:kept]
    return padded
