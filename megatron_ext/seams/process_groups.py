# SPDX-License-Identifier: Apache-2.0
"""Seam: process groups. Cuts the data-parallel dimension into workers.

A worker is a contiguous slice of the data-parallel dimension and holds whole TP, PP, CP and EP groups. The choke
points through which DDP, the optimizer and the model get their groups return the groups inside the worker. So a
worker is an ordinary Megatron job to everything that synchronises, while data loading, batch sizes and sample counts
keep seeing the whole data-parallel dimension, which makes the workers' samples disjoint.

Further layouts (`seams.strategies`) lie inside a worker from the start: while one of them is in place nothing is cut.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ext.hooks import CutsWorkers, GroupsBuilt, WorldReady, hooks
from megatron_ext.patching import Patch
from megatron_ext.worker_groups import WorkerGroups

__all__ = [
    "WORKER_VIEW_MODULES",
    "WorkerGroups",
    "current_groups",
    "let_layout_span_workers",
    "patches",
    "spans_workers",
]


# Modules that read data-parallel groups from parallel_state at call time and mean "the ranks that train one
# model together". Every other reader means "the ranks among which the data is split" and keeps the full groups.
WORKER_VIEW_MODULES = (
    ("megatron.core.distributed.finalize_model_grads", "parallel_state"),
    ("megatron.core.distributed.torch_fully_sharded_data_parallel", "parallel_state"),
    ("megatron.core.models.common.language_module.language_module", "parallel_state"),
    ("megatron.core.optimizer.optimizer", "parallel_state"),
    ("megatron.core.pipeline_parallel.schedules", "parallel_state"),
    ("megatron.core.process_groups_config", "parallel_state"),
    ("megatron.core.transformer.moe.moe_logging", "parallel_state"),
    ("megatron.core.transformer.moe.moe_utils", "parallel_state"),
    ("megatron.core.transformer.multi_token_prediction", "parallel_state"),
    ("megatron.core.transformer.utils", "parallel_state"),
    ("megatron.core.utils", "parallel_state"),
    ("megatron.training.utils.common_utils", "mpu"),
)

_groups: WorkerGroups | None = None
_cuts = True


def current_groups() -> WorkerGroups:
    """Return the groups of this run.

    Raises:
        RuntimeError: model-parallel groups have not been built yet.
    """
    if _groups is None:
        raise RuntimeError("worker groups are built by initialize_model_parallel, which has not run yet")
    return _groups


def spans_workers() -> bool:
    """Return whether the layout in place spans all workers, and is cut into them."""
    return _cuts


def let_layout_span_workers(spans: bool) -> None:
    """Say whether the layout in place spans all workers, or lies inside one as a whole."""
    global _cuts
    _cuts = spans


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    choke_points = [
        Patch(
            name=f"groups/{name}",
            target=f"megatron.core.process_groups_config:ProcessGroupCollection.{method}",
            wrap=_wrap_collection,
            parameters=("pg_collection",),
            rebind=False,
            reason="DDP and the optimizer synchronise inside the worker only",
        )
        for name, method in (
            ("ddp", "setup_process_groups_for_ddp"),
            ("optimizer", "setup_process_groups_for_optimizer"),
        )
    ]
    amax = Patch(
        name="groups/amax",
        target="megatron.core.parallel_state:get_amax_reduction_group",
        wrap=_wrap_amax,
        parameters=("with_context_parallel", "tp_only_amax_red"),
        reason="FP8's delayed scaling shares its maxima inside the worker only",
    )
    views = [
        Patch(
            name=f"groups/view/{module.removeprefix('megatron.')}",
            target=f"{module}:{attribute}",
            wrap=WorkerParallelState,
            rebind=False,
            reason="data-parallel groups read here mean the ranks that train one model together",
        )
        for module, attribute in WORKER_VIEW_MODULES
    ]
    views.append(
        Patch(
            name="groups/view/training.checkpointing",
            target="megatron.training.checkpointing:mpu",
            wrap=WorkerParallelState,
            rebind=False,
            reason="a worker's checkpoints are those of any job, also where Megatron does not give their code the "
            "model's groups (0.18, and the layer-wise optimizer's files)",
        )
    )
    build = Patch(
        name="groups/build",
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrap=_wrap_initialize,
        serves=(WorldReady, GroupsBuilt, CutsWorkers.worker_count),
        parameters=("create_gloo_process_groups", "distributed_timeout_minutes"),
        reason="build the groups inside each worker and the group across workers",
    )
    destroy = Patch(
        name="groups/destroy",
        target="megatron.core.parallel_state:destroy_model_parallel",
        wrap=_wrap_destroy,
        reason="forget the worker groups together with the groups they are made of",
    )
    return [build, destroy, amax, *choke_points, *views]


def _wrap_amax(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Any:
        if tp_only_amax_red or not _cuts:
            return original(with_context_parallel, tp_only_amax_red)
        groups = current_groups()
        return groups.tp_dp_cp if with_context_parallel else groups.tp_dp

    return get_amax_reduction_group


class WorkerParallelState:
    """`parallel_state` as a worker sees it: data-parallel getters answer for the worker, the rest forwards."""

    def __init__(self, full: Any) -> None:
        self._full = full

    def __getattr__(self, name: str) -> Any:
        return getattr(self._full, name)

    def _groups(self) -> WorkerGroups:
        return current_groups() if _cuts else _whole_groups(self._full)

    def get_data_parallel_group(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> Any:
        """Return the worker's data-parallel group."""
        return self._groups().dp_cp if with_context_parallel else self._groups().dp

    def get_data_parallel_group_gloo(
        self, with_context_parallel: bool = False, partial_data_parallel: bool = False
    ) -> Any:
        """Return the gloo twin of the worker's data-parallel group."""
        return self._groups().dp_cp_gloo if with_context_parallel else self._groups().dp_gloo

    def get_data_parallel_world_size(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        """Return the size of the worker's data-parallel group."""
        return int(self.get_data_parallel_group(with_context_parallel).size())

    def get_data_parallel_rank(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        """Return this rank's index in the worker's data-parallel group."""
        return int(self.get_data_parallel_group(with_context_parallel).rank())

    def get_expert_data_parallel_group(
        self,
        check_initialized: bool = True,
        with_gtp_remat: bool = True,
        partial_expert_data_parallel: bool = False,
    ) -> Any:
        """Return the worker's expert data-parallel group."""
        return self._groups().expert_dp

    def get_expert_data_parallel_group_gloo(self, partial_expert_data_parallel: bool = False) -> Any:
        """Return the gloo twin of the worker's expert data-parallel group."""
        return self._groups().expert_dp_gloo

    def get_expert_data_parallel_rank(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """Return this rank's index in the worker's expert data-parallel group."""
        return int(self._groups().expert_dp.rank())

    def get_expert_data_parallel_world_size(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """Return the size of the worker's expert data-parallel group."""
        return int(self._groups().expert_dp.size())

    def get_tensor_and_data_parallel_group(
        self, check_initialized: bool = True, with_context_parallel: bool = False
    ) -> Any:
        """Return the worker's tensor- and data-parallel group."""
        return self._groups().tp_dp_cp if with_context_parallel else self._groups().tp_dp

    def get_inter_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> None:
        """Return None: inside a worker there is one optimizer instance."""
        return None


def _wrap_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        global _groups
        from megatron.training import get_args

        args_of_run = get_args()
        ready = WorldReady(args=args_of_run)
        hooks.fire(ready)
        workers = hooks.worker_count(args_of_run)
        result = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        _groups = _build(
            workers,
            gloo=bool(given["create_gloo_process_groups"]),
            timeout=timedelta(minutes=given["distributed_timeout_minutes"], seconds=max(ready.waits, default=0.0)),
        )
        hooks.fire(GroupsBuilt(groups=_groups))
        return result

    return initialize_model_parallel


def _wrap_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        global _groups
        _groups = None
        return original(*args, **kwargs)

    return destroy_model_parallel


def _wrap_collection(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def setup_process_groups(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = original(*args, **kwargs)
        if not _cuts:
            return found
        groups = current_groups()
        inside = {
            "dp_group": groups.dp,
            "dp_cp_group": groups.dp_cp,
            "intra_dp_cp_group": groups.dp_cp,
            "expt_dp_group": groups.expert_dp,
            "intra_expt_dp_group": groups.expert_dp,
            "inter_dist_opt_group": None,
        }
        if found.get("intra_dist_opt_group") is not None:
            inside["intra_dist_opt_group"] = groups.inside
        twins = {"intra_dp_cp_group_gloo": groups.dp_cp_gloo, "intra_expt_dp_group_gloo": groups.expert_dp_gloo}
        inside |= {name: twin for name, twin in twins.items() if found.get(name) is not None}
        return {**found, **inside}

    return setup_process_groups


def _whole_groups(state: Any) -> WorkerGroups:
    """Return the groups while a layout is in place that lies inside the worker: its own."""
    return replace(
        current_groups(),
        dp=state.get_data_parallel_group(),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
        expert_dp=state.get_expert_data_parallel_group(),
        tp_dp=state.get_tensor_and_data_parallel_group(),
        tp_dp_cp=state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        dp_gloo=state._DATA_PARALLEL_GROUP_GLOO,
        dp_cp_gloo=state._DATA_PARALLEL_GROUP_WITH_CP_GLOO,
        expert_dp_gloo=state._EXPERT_DATA_PARALLEL_GROUP_GLOO,
    )


def _build(workers: int, gloo: bool, timeout: timedelta) -> WorkerGroups:
    """Cut Megatron's data-parallel groups into workers; every rank makes all groups in one order."""
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
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)

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
    groups = WorkerGroups(
        num_workers=workers,
        worker=worker,
        across=make([list(ranks) for ranks in zip(*inside, strict=True)]),
        inside=make(inside),
        dp=make(slices["dp"]),
        dp_cp=make(slices["dp_cp"]),
        expert_dp=make(slices["expert_dp"]),
        tp_dp=make(slices["tp_dp"]),
        tp_dp_cp=make(slices["tp_dp_cp"]),
        dp_gloo=twins["dp"],
        dp_cp_gloo=twins["dp_cp"],
        expert_dp_gloo=twins["expert_dp"],
    )
    _check(groups)
    return groups


def _slices(lists: list[list[int]], workers: int) -> list[list[int]]:
    """Cut every distinct list of ranks into `workers` contiguous parts of equal size.

    parallel_state lists the ranks of all these groups with the data index varying slowest, so the parts are
    slices of the data-parallel dimension; `_check` makes sure of it.
    """
    parts = []
    for ranks in sorted({tuple(ranks) for ranks in lists}):
        size = len(ranks) // workers
        parts += [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
    return parts


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
    if len(members) * groups.num_workers != dist.get_world_size():
        raise RuntimeError(f"{groups.num_workers} workers of {len(members)} ranks are not the whole world")
