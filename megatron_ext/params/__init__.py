# SPDX-License-Identifier: Apache-2.0
"""The global parameter view: every tensor of a model by global name, and what each rank holds of it.

``GptShape`` and ``Layout`` say what the model is and how it is cut; ``Placement`` computes which rank holds which part;
``scatter`` and ``gather`` move values between full tensors and ranks. None of that needs Megatron.
``ParameterView.from_model`` describes the parameters of a running rank and checks the description against
Megatron's own; ``megatron_ext.params.optimizer_shards.dp_shards`` adds what the rank's optimizer owns.
"""

from megatron_ext.params.boxes import (
    Overlap,
    Piece,
    Slice,
    flat_boxes,
    flat_offset,
    global_views,
    overlaps,
    put,
    take,
)
from megatron_ext.params.gpt import QkvRows, gpt_parameters, qkv_rows
from megatron_ext.params.gpt_shape import GptShape, LatentAttention
from megatron_ext.params.layout import DEFAULT_ORDER, Coordinates, Layout, shard_range, uneven_layers
from megatron_ext.params.parameter_names import global_name
from megatron_ext.params.placement import Placed, Placement, gather, scatter
from megatron_ext.params.tensors import GlobalTensor, ParamsError, Split, layer_unit, repad_rows
from megatron_ext.params.view import LocalParameter, ParameterView

__all__ = [
    "DEFAULT_ORDER",
    "Coordinates",
    "GlobalTensor",
    "GptShape",
    "LatentAttention",
    "Layout",
    "LocalParameter",
    "Overlap",
    "ParameterView",
    "ParamsError",
    "Piece",
    "Placed",
    "Placement",
    "QkvRows",
    "Slice",
    "Split",
    "flat_boxes",
    "flat_offset",
    "gather",
    "global_name",
    "global_views",
    "gpt_parameters",
    "layer_unit",
    "overlaps",
    "put",
    "qkv_rows",
    "repad_rows",
    "scatter",
    "shard_range",
    "take",
    "uneven_layers",
]
