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
import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from megatron_ext.hooks import CutsWorkers, GroupsBuilt, WorldReady, hooks
from megatron_ext.patching import Patch
from megatron_ext.patching.bound_arguments import bound_with_defaults
from megatron_ext.run_options import run_options
from megatron_ext.worker_cuts import cut_workers
from megatron_ext.worker_groups import InstanceGroups, WorkerGroups

__all__ = [
    "WORKER_VIEW_MODULES",
    "WorkerGroups",
    "current_groups",
    "let_layout_span_workers",
    "patches",
    "seen_by_a_worker",
    "spans_workers",
    "whole_groups",
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


def seen_by_a_worker(state: Any) -> Any:
    """Return `parallel_state` as a worker sees it, or itself where no feature cuts the run into workers."""
    return state if _groups is None else WorkerParallelState(state)


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
        return current_groups() if _cuts else whole_groups(self._full)

    def get_data_parallel_group(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> Any:
        """Return the worker's data-parallel group, or that of the optimizer instance in it."""
        if partial_data_parallel:
            return self._groups().instance.dp_cp
        return self._groups().dp_cp if with_context_parallel else self._groups().dp

    def get_data_parallel_group_gloo(
        self, with_context_parallel: bool = False, partial_data_parallel: bool = False
    ) -> Any:
        """Return the gloo twin of `get_data_parallel_group`."""
        if partial_data_parallel:
            return self._groups().instance.dp_cp_gloo
        return self._groups().dp_cp_gloo if with_context_parallel else self._groups().dp_gloo

    def get_data_parallel_world_size(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        """Return the size of `get_data_parallel_group`."""
        return int(self.get_data_parallel_group(with_context_parallel, with_gtp_remat, partial_data_parallel).size())

    def get_data_parallel_rank(
        self,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        """Return this rank's index in `get_data_parallel_group`."""
        return int(self.get_data_parallel_group(with_context_parallel, with_gtp_remat, partial_data_parallel).rank())

    def get_expert_data_parallel_group(
        self,
        check_initialized: bool = True,
        with_gtp_remat: bool = True,
        partial_expert_data_parallel: bool = False,
    ) -> Any:
        """Return the worker's expert data-parallel group, or that of the optimizer instance in it."""
        return self._groups().instance.expert_dp if partial_expert_data_parallel else self._groups().expert_dp

    def get_expert_data_parallel_group_gloo(self, partial_expert_data_parallel: bool = False) -> Any:
        """Return the gloo twin of `get_expert_data_parallel_group`."""
        groups = self._groups()
        return groups.instance.expert_dp_gloo if partial_expert_data_parallel else groups.expert_dp_gloo

    def get_expert_data_parallel_rank(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """Return this rank's index in `get_expert_data_parallel_group`."""
        return int(self.get_expert_data_parallel_group(False, with_gtp_remat, partial_expert_data_parallel).rank())

    def get_expert_data_parallel_world_size(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """Return the size of `get_expert_data_parallel_group`."""
        return int(self.get_expert_data_parallel_group(False, with_gtp_remat, partial_expert_data_parallel).size())

    def get_tensor_and_data_parallel_group(
        self, check_initialized: bool = True, with_context_parallel: bool = False
    ) -> Any:
        """Return the worker's tensor- and data-parallel group."""
        return self._groups().tp_dp_cp if with_context_parallel else self._groups().tp_dp

    def get_inter_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> Any:
        """Return the group across the worker's optimizer instances; None with one."""
        return self._groups().instance.across

    def get_intra_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> Any:
        """Return all ranks of the optimizer instance inside the worker."""
        return self._groups().instance.whole


def _wrap_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        global _groups
        args_of_run = run_options()
        ready = WorldReady(args=args_of_run)
        hooks.fire(ready)
        workers = hooks.worker_count(args_of_run)
        bound = bound_with_defaults(signature, args, kwargs)
        given = bound.arguments
        instances = int(given["num_distributed_optimizer_instances"])
        # Instances are cut out of workers; Megatron's would be parts of the whole data-parallel dimension.
        given["num_distributed_optimizer_instances"] = 1
        result = original(*bound.args, **bound.kwargs)
        _groups = cut_workers(
            workers,
            instances,
            gloo=bool(given["create_gloo_process_groups"]),
            timeout=timedelta(minutes=given["distributed_timeout_minutes"], seconds=max(ready.waits, default=0.0)),
        )
        # Its getter has no group to return where Megatron made one instance, and insists on one.
        state: Any = importlib.import_module(original.__module__)
        state._INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = _groups.instance.across
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
            "intra_dp_cp_group": groups.instance.dp_cp,
            "expt_dp_group": groups.expert_dp,
            "intra_expt_dp_group": groups.instance.expert_dp,
            "inter_dist_opt_group": groups.instance.across,
        }
        where_wanted = {
            "intra_dist_opt_group": groups.instance.whole,
            "intra_dp_cp_group_gloo": groups.instance.dp_cp_gloo,
            "intra_expt_dp_group_gloo": groups.instance.expert_dp_gloo,
        }
        inside |= {name: group for name, group in where_wanted.items() if found.get(name) is not None}
        return {**found, **inside}

    return setup_process_groups


def whole_groups(state: Any) -> WorkerGroups:
    """Return the groups of the layout in place, not cut into workers."""
    dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    instance = InstanceGroups(
        dp_cp=dp_cp,
        expert_dp=state.get_expert_data_parallel_group(),
        whole=state.get_intra_distributed_optimizer_instance_group(),
        across=None,
        dp_cp_gloo=state._DATA_PARALLEL_GROUP_WITH_CP_GLOO,
        expert_dp_gloo=state._EXPERT_DATA_PARALLEL_GROUP_GLOO,
    )
    return replace(
        current_groups(),
        instance=instance,
        dp=state.get_data_parallel_group(),
        dp_cp=dp_cp,
        expert_dp=instance.expert_dp,
        tp_dp=state.get_tensor_and_data_parallel_group(),
        tp_dp_cp=state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        dp_gloo=state._DATA_PARALLEL_GROUP_GLOO,
        dp_cp_gloo=instance.dp_cp_gloo,
        expert_dp_gloo=instance.expert_dp_gloo,
    )
