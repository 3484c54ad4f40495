# SPDX-License-Identifier: Apache-2.0
"""How many values each unit of a simulated model has: what rounds and fragments move."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.params import GptShape, gpt_parameters, layer_unit

__all__ = ["equal_layers", "units_of"]


def units_of(shape: GptShape) -> dict[str, int]:
    """Return the number of values of every unit of a GPT, in model order."""
    found: dict[str, int] = {}
    for tensor in gpt_parameters(shape):
        found[tensor.unit] = found.get(tensor.unit, 0) + tensor.numel
    return found


def equal_layers(parameters: int, layers: int) -> Mapping[str, int]:
    """Return units of a model of which no more is known than its size, which its layers share equally."""
    return {
        layer_unit(layer): parameters * (layer + 1) // layers - parameters * layer // layers for layer in range(layers)
    }
