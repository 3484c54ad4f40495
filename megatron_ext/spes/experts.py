# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a model belong to which routed expert, told from their global names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.errors import UserError

__all__ = ["ExpertLayer", "expert_layer_of", "expert_layers", "expert_of"]

_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(.+)")
_FC1, _FC2 = "linear_fc1.weight", "linear_fc2.weight"

Shape = tuple[int, ...]


def expert_of(name: str) -> int | None:
    """Return the global number of the routed expert that a tensor belongs to.

    Args:
        name: global name, such as `decoder.layers.7.mlp.experts.3.linear_fc1.weight`.

    Returns:
        The expert; None for everything that is shared: attention, norms, embeddings, routers, shared experts.
    """
    match = _EXPERT.fullmatch(name)
    return None if match is None else int(match[2])


def expert_layer_of(name: str) -> str | None:
    """Return the layer of the routed expert that a tensor belongs to, such as `decoder.layers.7.mlp`, None for others.

    Args:
        name: global name.
    """
    match = _EXPERT.fullmatch(name)
    return None if match is None else match[1]


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """The routed experts of one layer."""

    name: str
    """What their names begin with, such as `decoder.layers.7.mlp`."""

    tensors: Mapping[str, tuple[str, ...]]
    """By the name within an expert (`linear_fc1.weight`), the global names of all experts' tensors, in the order of the
    experts."""

    sizes: Mapping[str, int]
    """By the name within an expert, the number of elements of the tensor of one expert."""

    compared: int
    """By how many of the first elements of `linear_fc1.weight` experts are compared: with a gated MLP those of the gate
    (w1 in the paper), which are its first rows, else all."""

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.tensors[_FC1])

    @property
    def first(self) -> tuple[str, ...]:
        """Global names of the tensors by which experts are compared."""
        return self.tensors[_FC1]


def expert_layers(shapes: Mapping[str, Shape]) -> list[ExpertLayer]:
    """Return the layers that have routed experts.

    Args:
        shapes: global shapes of a model's tensors by their global names, in any order.

    Returns:
        The layers, in the order in which their names come first.

    Raises:
        UserError: the experts of a layer do not have the same tensors; names one.
    """
    found: dict[str, dict[str, dict[int, str]]] = {}
    for name in shapes:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            found.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = name
    return [_layer(prefix, found[prefix], shapes) for prefix in found]


def _layer(prefix: str, found: dict[str, dict[int, str]], shapes: Mapping[str, Shape]) -> ExpertLayer:
    """Return a layer, given its tensors by their names within an expert and by expert."""
    count = 1 + max(expert for by_expert in found.values() for expert in by_expert)
    for leaf in (_FC1, _FC2, *found):
        by_expert = found.get(leaf, {})
        for expert in range(count):
            if expert not in by_expert:
                raise UserError(
                    f"tensor {prefix}.experts.{expert}.{leaf} is missing; all {count} experts of a layer must have the "
                    f"same tensors, {_FC1} and {_FC2} among them"
                )
            if shapes[by_expert[expert]] != shapes[by_expert[0]]:
                raise UserError(
                    f"tensor {by_expert[expert]} has the shape {shapes[by_expert[expert]]} and {by_expert[0]} "
                    f"{shapes[by_expert[0]]}; the experts of a layer must be of one size"
                )
    first, second = shapes[found[_FC1][0]], shapes[found[_FC2][0]]
    sizes = {leaf: _numel(shapes[found[leaf][0]]) for leaf in sorted(found)}
    # The gate and the up projection are one tensor, twice as high as the down projection is wide.
    is_gated = first[0] == 2 * second[-1]
    return ExpertLayer(
        name=prefix,
        tensors={leaf: tuple(found[leaf][expert] for expert in range(count)) for leaf in sorted(found)},
        sizes=sizes,
        compared=sizes[_FC1] // 2 if is_gated else sizes[_FC1],
    )


def _numel(shape: Shape) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
