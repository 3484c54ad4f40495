# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own resharding as the other side of a comparison: its planner, executor and NCCL service, on gloo."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron_ext.params import GptShape, Layout, Placed

__all__ = ["resharding"]


def resharding(
    shape: GptShape, source: Layout, target: Layout, rank: int, tensors: dict[str, torch.Tensor]
) -> tuple[Callable[[], None], dict[str, torch.Tensor]]:
    """Prepare a switch of megatron-core's between two layouts of a dense GPT.

    Needs the CPU backend, because the service asks for CUDA streams.

    Args:
        shape: the model.
        source: the layout before.
        target: the layout after.
        rank: this process.
        tensors: what the rank holds before, by name.

    Returns:
        A function that carries the plan out, and the tensors that it writes, by name.
    """
    import torch
    from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
    from megatron.core.resharding.execution import execute_reshard_plan
    from megatron.core.resharding.planner import build_plan_from_rosters, index_metadata_rosters

    from megatron_ext.params import Placement

    before, after = Placement(shape, source), Placement(shape, target)
    rosters = [
        tuple(
            [_metadata(placed, placement, each) for placed in placement.on_rank(each)] for placement in (before, after)
        )
        for each in range(source.world_size)
    ]
    held_before, held_after = index_metadata_rosters(rosters)
    plan = build_plan_from_rosters(held_before, held_after, rank)
    results = {
        placed.name: torch.zeros(placed.slice.local_shape, dtype=placed.tensor.dtype) for placed in after.on_rank(rank)
    }
    # What the executor takes for modules: it looks for the tensors in their cache first.
    modules = [SimpleNamespace(_refit_tensor_cache=held) for held in (tensors, results)]
    service = NCCLCopyService()
    return lambda: execute_reshard_plan(plan, *modules, service), results


def _metadata(placed: Placed, placement: Any, rank: int) -> Any:
    """Describe a tensor of a rank as megatron-core's planner has it."""
    from megatron.core.resharding.utils import ParameterMetadata

    layout, split = placement.layout, placed.tensor.split
    place = layout.coordinates(rank)
    places = [(each, layout.coordinates(each)) for each in range(layout.world_size)]
    return ParameterMetadata(
        name=placed.name,
        resolved_name=placed.name,
        shape=placed.slice.local_shape,
        dtype=placed.tensor.dtype,
        element_size=placed.tensor.dtype.itemsize,
        is_tp=split is not None,
        partition_dim=0 if split is None else split.axis,
        partition_stride=1 if split is None else len(split.blocks),
        owner_rank=rank,
        tensor_parallel_group_ranks=[each for each, at in places if (at.pp, at.dp) == (place.pp, place.dp)],
        data_parallel_group_ranks=[each for each, at in places if (at.pp, at.tp) == (place.pp, place.tp)],
        pipeline_parallel_group_ranks=[each for each, at in places if (at.dp, at.tp) == (place.dp, place.tp)],
    )
