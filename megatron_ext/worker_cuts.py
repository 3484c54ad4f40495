# SPDX-License-Identifier: Apache-2.0
"""Cutting Megatron's data-parallel groups into those of workers, and a worker's into optimizer instances."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ext.params import DEFAULT_ORDER, Layout
from megatron_ext.run_options import run_options
from megatron_ext.worker_groups import InstanceGroups, WorkerGroups

__all__ = ["computed_places", "cut_workers"]

Place = tuple[int, dict[str, list[int]]]
"""The worker of a rank, and by name the ranks of the groups that it is in."""


def cut_workers(workers: int, instances: int, gloo: bool, timeout: timedelta) -> WorkerGroups:
    """Cut Megatron's data-parallel groups into workers; every rank makes all groups in one order.

    Args:
        workers: how many.
        instances: optimizer instances of each worker.
        gloo: whether there are twins of the groups over gloo.
        timeout: of the groups.
    """
    from megatron.core import parallel_state as state

    full = {
        "dp": state.get_data_parallel_group(),
        "dp_cp": state.get_data_parallel_group(with_context_parallel=True),
        "expert_dp": state.get_expert_data_parallel_group(),
        "tp_dp": state.get_tensor_and_data_parallel_group(),
        "tp_dp_cp": state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    }
    worker = full["dp"].rank() * workers // full["dp"].size()
    mine = (worker, {name: dist.get_process_group_ranks(group) for name, group in full.items()})
    everyone = _everyone(mine, workers)

    def make(lists: list[list[int]], backend: str | None = None) -> Any:
        found = None
        for ranks in lists:
            group = dist.new_group(ranks, timeout=timeout, backend=backend)
            if dist.get_rank() in ranks:
                found = group
        return found

    inside = [
        [rank for rank, (index, _) in enumerate(everyone) if index == number] for number in range(workers)
    ]
    slices = {name: _slices([members[name] for _, members in everyone], workers) for name in full}
    twins = {name: make(slices[name], "gloo") if gloo else None for name in ("dp", "dp_cp", "expert_dp")}
    own = {name: make(slices[name]) for name in slices}
    whole = make(inside)
    if instances == 1:
        instance = InstanceGroups(
            dp_cp=own["dp_cp"],
            expert_dp=own["expert_dp"],
            whole=whole,
            across=None,
            dp_cp_gloo=twins["dp_cp"],
            expert_dp_gloo=twins["expert_dp"],
        )
    else:
        instance = _cut_instances(slices, inside, instances, make, gloo)
    groups = WorkerGroups(
        num_workers=workers,
        worker=worker,
        across=make([list(ranks) for ranks in zip(*inside, strict=True)]),
        inside=whole,
        dp=own["dp"],
        dp_cp=own["dp_cp"],
        expert_dp=own["expert_dp"],
        tp_dp=own["tp_dp"],
        tp_dp_cp=own["tp_dp_cp"],
        instance=instance,
        dp_gloo=twins["dp"],
        dp_cp_gloo=twins["dp_cp"],
        expert_dp_gloo=twins["expert_dp"],
    )
    _check(groups)
    return groups


def _everyone(mine: Place, workers: int) -> list[Place]:
    """Return the place of every rank.

    Args:
        mine: this rank's.
        workers: how many.
    """
    if dist.get_backend() != "fake":
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone
    # There is nobody else: `megatron_ext.explain` builds one rank of a job by itself.
    computed = computed_places(workers)
    if computed[dist.get_rank()] != mine:
        raise RuntimeError(f"rank {dist.get_rank()} is in other groups than its layout says")
    return computed


def computed_places(workers: int) -> list[Place]:
    """Return what `_everyone` does, by arithmetic."""
    from megatron.core import parallel_state as state
    layout = Layout(
        tp=state.get_tensor_model_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
        cp=state.get_context_parallel_world_size(),
        dp=state.get_data_parallel_world_size(),
        ep=state.get_expert_model_parallel_world_size(),
        etp=state.get_expert_tensor_parallel_world_size(),
        order="tp-cp-ep-pp-dp" if run_options().use_tp_pp_dp_mapping else DEFAULT_ORDER,
    )
    keys = []
    members: dict[tuple[Any, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        own = {
            "dp": ("dp", at.tp, at.pp, at.cp),
            "dp_cp": ("dp_cp", at.tp, at.pp),
            "expert_dp": ("expert_dp", at.ep, at.etp, at.pp),
            "tp_dp": ("tp_dp", at.cp, at.pp),
            "tp_dp_cp": ("tp_dp_cp", at.pp),
        }
        keys.append((at.dp * workers // layout.dp, own))
        for key in own.values():
            members.setdefault(key, []).append(rank)
    return [(worker, {name: members[key] for name, key in own.items()}) for worker, own in keys]


def _cut_instances(
    slices: dict[str, list[list[int]]],
    inside: list[list[int]],
    instances: int,
    make: Callable[..., Any],
    gloo: bool,
) -> InstanceGroups:
    """Cut the workers' groups into optimizer instances, as Megatron cuts those of a job.

    Args:
        slices: ranks of the workers' groups, by name.
        inside: ranks of every worker.
        instances: of each worker.
        make: makes groups of lists of ranks and returns this rank's.
        gloo: whether there are twins of the groups over gloo.
    """
    cuts = {name: [_parts(ranks, instances) for ranks in slices[name]] for name in ("dp_cp", "expert_dp")}
    lists = {name: [part for cut in cuts[name] for part in cut] for name in cuts}
    instance_of = {rank: index for cut in cuts["dp_cp"] for index, part in enumerate(cut) for rank in part}
    wholes = [[rank for rank in ranks if instance_of[rank] == index] for ranks in inside for index in range(instances)]
    return InstanceGroups(
        dp_cp=make(lists["dp_cp"]),
        expert_dp=make(lists["expert_dp"]),
        whole=make(wholes),
        # Megatron reduces the gradients of all parameters across instances over the expert ranks' groups.
        across=make([list(ranks) for cut in cuts["expert_dp"] for ranks in zip(*cut, strict=True)]),
        dp_cp_gloo=make(lists["dp_cp"], "gloo") if gloo else None,
        expert_dp_gloo=make(lists["expert_dp"], "gloo") if gloo else None,
    )


def _slices(lists: list[list[int]], workers: int) -> list[list[int]]:
    """Cut every distinct list of ranks into `workers` contiguous parts of equal size.

    parallel_state lists the ranks of all these groups with the data index varying slowest, so the parts are
    slices of the data-parallel dimension; `_check` makes sure of it.
    """
    parts = []
    for ranks in sorted({tuple(ranks) for ranks in lists}):
        parts += _parts(list(ranks), workers)
    return parts


def _parts(ranks: list[int], count: int) -> list[list[int]]:
    size = len(ranks) // count
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _check(groups: WorkerGroups) -> None:
    """Refuse a cut that does not give whole, disjoint workers.

    Raises:
        RuntimeError: a group of this rank reaches outside its worker, or `across` reaches inside one.
    """
    members = set(dist.get_process_group_ranks(groups.inside))
    for name in ("dp", "dp_cp", "expert_dp", "tp_dp", "tp_dp_cp"):
        if not set(dist.get_process_group_ranks(getattr(groups, name))) <= members:
            raise RuntimeError(f"worker {groups.worker}: group {name} reaches outside the worker")
    if len(members & set(dist.get_process_group_ranks(groups.across))) != 1:
        raise RuntimeError(f"worker {groups.worker}: the group across workers must hold one rank of each")
    from megatron.core import parallel_state as state

    for name in (
        "tensor_model_parallel",
        "pipeline_model_parallel",
        "context_parallel",
        "expert_model_parallel",
    ):
        group = getattr(state, f"get_{name}_group")()
        if not set(dist.get_process_group_ranks(group)) <= members:
            raise RuntimeError(f"worker {groups.worker} would cut a {name} group")
    _check_instance(groups)
    if len(members) * groups.num_workers != dist.get_world_size():
        raise RuntimeError(f"{groups.num_workers} workers of {len(members)} ranks are not the whole world")


def _check_instance(groups: WorkerGroups) -> None:
    """Refuse optimizer instances whose shards do not correspond.

    Raises:
        RuntimeError: a group of this rank reaches outside its instance, or `across` is not one rank of each.
    """
    instance = groups.instance
    if instance.across is None:
        return
    members = set(dist.get_process_group_ranks(instance.whole))
    for group in (instance.dp_cp, instance.expert_dp):
        if not set(dist.get_process_group_ranks(group)) <= members:
            raise RuntimeError(f"worker {groups.worker}: a group reaches outside the optimizer instance")
    alike = set(dist.get_process_group_ranks(groups.dp_cp)[instance.dp_cp.rank() :: instance.dp_cp.size()])
    if set(dist.get_process_group_ranks(instance.across)) != alike:
        raise RuntimeError(f"worker {groups.worker}: optimizer instances give the same shard to other ranks")
