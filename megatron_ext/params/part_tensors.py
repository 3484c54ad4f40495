# SPDX-License-Identifier: Apache-2.0
"""The tensors of parts of layers that are neither softmax attention nor an MLP or experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron_ext.params.gpt_shape import GptShape
from megatron_ext.params.layer_tensors import UnitPlace, column, norm, row, whole
from megatron_ext.params.tensors import GlobalTensor


def delta_net(shape: GptShape, prefix: str, place: UnitPlace) -> Iterator[GlobalTensor]:
    """The tensors of Gated DeltaNet in one layer.

    Tensor parallelism gives each rank whole heads: of the input projection and of the convolution, which are several
    matrices in one, a part of each.
    """
    sizes = shape.delta_net
    assert sizes is not None, "a shape with such layers has their sizes"
    for name in ("dt_bias", "A_log"):
        yield column(shape, prefix + name, (sizes.value_heads,), place, None)
    blocks, names = tuple(sizes.projected.values()), tuple(sizes.projected)
    yield column(shape, prefix + "in_proj.weight", (sum(blocks), shape.hidden_size), place, None, blocks, names)
    blocks, names = tuple(sizes.convolved.values()), tuple(sizes.convolved)
    yield column(shape, prefix + "conv1d.weight", (sum(blocks), 1, sizes.conv_width), place, None, blocks, names)
    yield from norm(shape, prefix + "out_norm", sizes.value_head_dim, place)
    yield from row(shape, prefix + "out_proj", (shape.hidden_size, sizes.inner_size), place, None, bias=False)


def sparse_indexer(shape: GptShape, query_size: int, prefix: str, place: UnitPlace) -> Iterator[GlobalTensor]:
    """The tensors of one layer's indexer.

    Args:
        shape: the model.
        query_size: channels of what its queries are projected from.
        prefix: of the attention.
        place: what they belong to.
    """
    sizes = shape.sparse_indexer
    assert sizes is not None, "a shape with such layers has their sizes"
    prefix += "core_attention.indexer."
    yield whole(shape, prefix + "linear_wq_b.weight", (sizes.heads * sizes.head_dim, query_size), place)
    yield whole(shape, prefix + "linear_wk.weight", (sizes.head_dim, shape.hidden_size), place)
    for name in ("weight", "bias"):  # a LayerNorm, whatever the model's are
        yield whole(shape, f"{prefix}k_norm.{name}", (sizes.head_dim,), place)
    yield whole(shape, prefix + "linear_weights_proj.weight", (sizes.heads, shape.hidden_size), place)


def linear_part(shape: GptShape, prefix: str, place: UnitPlace) -> Iterator[GlobalTensor]:
    """The tensors of one linear layer in place of attention or of an MLP, of whose outputs each rank makes a part.

    Args:
        shape: the model.
        prefix: of what it stands for, as ``decoder.layers.0.mlp.``.
        place: what they belong to.
    """
    yield column(shape, prefix + "weight", (shape.hidden_size, shape.hidden_size), place, None)
    if shape.add_bias_linear:
        yield column(shape, prefix + "bias", (shape.hidden_size,), place, None)


def state_space_layer(shape: GptShape, prefix: str, place: UnitPlace) -> Iterator[GlobalTensor]:
    """The tensors of one layer.

    Tensor parallelism gives each rank whole heads and groups: of the input projection and of the convolution, which
    are several matrices in one, a part of each.
    """
    sizes = shape.state_space
    assert sizes is not None, "a shape with such layers has their sizes"
    mixer, heads = prefix + "mixer.", (sizes.heads,)
    yield from norm(shape, prefix + "norm", shape.hidden_size, place)
    yield column(shape, mixer + "dt_bias", heads, place, None)
    for name in ("A_log", "D"):
        yield replace(column(shape, mixer + name, heads, place, None), dtype=torch.float32)
    blocks, names = tuple(sizes.convolved.values()), tuple(sizes.convolved)
    for name, per_channel in (("weight", (1, sizes.conv_width)), ("bias", ())):
        yield column(shape, f"{mixer}conv1d.{name}", (sum(blocks), *per_channel), place, None, blocks, names)
    blocks, names = tuple(sizes.projected.values()), tuple(sizes.projected)
    yield column(shape, mixer + "in_proj.weight", (sum(blocks), shape.hidden_size), place, None, blocks, names)
    yield column(shape, mixer + "norm.weight", (sizes.inner_size,), place, None)
    yield from row(shape, mixer + "out_proj", (shape.hidden_size, sizes.inner_size), place, None, bias=False)
