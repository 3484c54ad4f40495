# SPDX-License-Identifier: Apache-2.0
"""A module's parameters as the engine sees them: their unit, and what of them this rank holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["is_first_copy", "local_part", "unit_of"]

# The first number in a parameter's name is that of its layer.
_LAYER = re.compile(r"^(.*?\.)?\d+(?=\.)")


def unit_of(name: str) -> str:
    """Return the unit of a parameter: its layer, which the first number in its name tells, else its module."""
    layer = _LAYER.match(name)
    return layer[0] if layer else name.rpartition(".")[0] or name


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of a parameter on this rank."""
    from torch.distributed.tensor import DTensor

    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()


def is_first_copy(parameter: torch.Tensor, inside: Any) -> bool:
    """Return whether this rank is the first of its worker that holds this part of a parameter."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return dist.get_rank(inside) == 0
    place: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    return not any(
        number for number, placement in zip(place, parameter.placements, strict=True) if placement.is_replicate()
    )
