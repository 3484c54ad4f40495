# SPDX-License-Identifier: Apache-2.0
"""The tensors of a state-space (Mamba-2) layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron_ext.params.gpt_shape import GptShape
from megatron_ext.params.layer_tensors import UnitPlace, column, norm, row
from megatron_ext.params.tensors import GlobalTensor


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
