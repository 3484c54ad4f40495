# SPDX-License-Identifier: Apache-2.0
"""A module's parameters as the engine sees them: their order, their unit, and what of them this rank holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.exchange.outer_state import SyncedTensor

__all__ = [
    "averages_gradients",
    "in_model_order",
    "is_first_copy",
    "local_part",
    "require_all_within",
    "require_same_memory",
    "unit_of",
]

# The first number in a parameter's name is that of its layer.
_LAYER = re.compile(r"^(.*?\.)?\d+(?=\.)")


def averages_gradients(model: torch.nn.Module, across: dist.ProcessGroup | None) -> bool:
    """Return whether DDP averages a module's gradients over workers, and no hook could see to it that it does not.

    Args:
        model: the module.
        across: the group with one rank of every worker.
    """
    workers = set(dist.get_process_group_ranks(across))
    return any(
        len(workers.intersection(dist.get_process_group_ranks(module.process_group))) > 1
        # Where torch keeps them has no other name; without it nothing is said.
        and not getattr(module, "_comm_hooks", True)
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    )


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


def in_model_order(named: Mapping[str, torch.Tensor], model: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Return parameters in the order of their module, if it is known: that of an optimizer may differ by process."""
    places = {} if model is None else {id(parameter): place for place, parameter in enumerate(model.parameters())}
    return dict(sorted(named.items(), key=lambda entry: places.get(id(entry[1]), len(places))))


def require_all_within(named: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Check that parameters are those of a module.

    Raises:
        UserError: one is not.
    """
    known = {id(parameter) for parameter in model.parameters()}
    for name, parameter in named.items():
        if id(parameter) not in known:
            raise UserError(
                f"sync_in_forward: parameter {name} is not in the module whose forward pass brings rounds to their "
                "end; give a module with all of the optimizer's parameters, or drop it"
            )


def require_same_memory(parameters: Sequence[torch.Tensor], synced: Sequence[SyncedTensor]) -> None:
    """Check that parameters lie where they did when local SGD began.

    Raises:
        UserError: one was replaced, so that rounds would move memory that is not trained.
    """
    for parameter, entry in zip(parameters, synced, strict=True):
        if local_part(parameter).data_ptr() != entry.tensor.data_ptr():
            raise UserError(
                f"parameter {entry.name} has other memory than when local SGD began (its .data was replaced); copy "
                "into it instead, or wrap the optimizer afterwards"
            )
