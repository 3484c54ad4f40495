# SPDX-License-Identifier: Apache-2.0
"""The kinds of tensors that layers are made of, by how tensor parallelism cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.params.gpt_shape import GptShape
from megatron_ext.params.tensors import GlobalTensor, Split


@dataclass(frozen=True)
class UnitPlace:
    """What tensors belong to."""

    unit: str
    """Their unit."""

    layer: int | None = None
    """Their decoder layer, None outside the decoder layers."""


def row(
    shape: GptShape, prefix: str, size: tuple[int, int], place: UnitPlace, expert: int | None, *, bias: bool
) -> Iterator[GlobalTensor]:
    """A row parallel linear layer: the input axis is cut, the bias is not."""
    yield GlobalTensor(
        name=prefix + ".weight",
        shape=size,
        dtype=shape.dtype,
        unit=place.unit,
        layer=place.layer,
        expert=expert,
        split=Split(axis=1, blocks=(size[1],)),
    )
    if bias:
        yield GlobalTensor(
            name=prefix + ".bias",
            shape=size[:1],
            dtype=shape.dtype,
            unit=place.unit,
            layer=place.layer,
            expert=expert,
        )


def column(
    shape: GptShape,
    name: str,
    size: tuple[int, ...],
    place: UnitPlace,
    expert: int | None,
    blocks: tuple[int, ...] = (),
    names: tuple[str, ...] = (),
) -> GlobalTensor:
    """A tensor whose first axis is cut, evenly or block by block."""
    return GlobalTensor(
        name=name,
        shape=size,
        dtype=shape.dtype,
        unit=place.unit,
        layer=place.layer,
        expert=expert,
        split=Split(axis=0, blocks=blocks or size[:1], names=names),
    )


def whole(
    shape: GptShape, name: str, size: tuple[int, ...], place: UnitPlace, expert: int | None = None
) -> GlobalTensor:
    """A tensor of which every tensor parallel rank holds all."""
    return GlobalTensor(name=name, shape=size, dtype=shape.dtype, unit=place.unit, layer=place.layer, expert=expert)


def norm(shape: GptShape, prefix: str, size: int, place: UnitPlace) -> Iterator[GlobalTensor]:
    """A norm, which every tensor parallel rank holds."""
    for name in ("weight", "bias") if shape.normalization == "LayerNorm" else ("weight",):
        yield whole(shape, f"{prefix}.{name}", (size,), place)
