# SPDX-License-Identifier: Apache-2.0
"""What local SGD writes in Megatron's legacy format (`--ckpt-format torch`), and how it reads it back.

Every worker's files are those that a job of its ranks would write, weights included. At a sync point worker 0's are
where stock Megatron looks, and those of worker i in the folder `local_sgd_worker_<i>` beside them. In the middle of an
interval worker 0's are in such a folder, too, and where stock Megatron looks is a file without weights that says so.
Beside them are anchor and outer optimizer, once, and what a worker alone has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_ext.hooks import RankFiles, SaveContext
from megatron_ext.legacy_format.rank_file import read_rank_file, write_rank_file
from megatron_ext.local_sgd.checkpoints.load_plan import SUMMARY, LoadPlan, fresh_like, shapes_of, summary_of
from megatron_ext.local_sgd.job.worker import Worker
from megatron_ext.local_sgd.taken_over import refuse_other_model
from megatron_ext.seams.optimizer import InnerValues, is_distributed
from megatron_ext.seams.sharded_state import beside_view
from megatron_ext.worker_groups import WorkerGroups

__all__ = ["assemble_files", "part_of", "request_files"]

_OUTER, _OWN = "local_sgd_outer", "local_sgd_own"

_Tensors = dict[str, list[torch.Tensor]]


def assemble_files(
    context: SaveContext, files: RankFiles, worker: Worker, by_time: dict[str, Any] | None = None
) -> None:
    """Write what is local SGD's own, and say where this worker's files go; all ranks call it.

    Args:
        context: of the save.
        files: of it; changed in place.
        worker: whose rank this is.
        by_time: state of the meetings, where workers meet by time; the same on all ranks.
    """
    groups, engine, values = worker.groups, worker.engine, worker.values
    tensors = engine.tensor_state()
    own = engine.worker_state()
    context.state[SUMMARY] = summary_of(worker, tensors, own, by_time)
    files.part = part_of(groups.worker, engine.synced)
    files.leaves_head = groups.worker == 0 and not engine.synced
    # Megatron's rule of who writes; of ranks that share a context, one.
    writes = groups.dp_cp.rank() == 0 or groups.expert_dp.rank() == 0 or values.is_layer_wise
    if tensors and groups.worker == 0:
        _write(values, tensors, files.path(_name(_OUTER, groups, values)), writes)
    if own:
        _write(values, own, files.path(_name(_OWN, groups, values)), writes)


def request_files(
    context: SaveContext, files: RankFiles, plan: LoadPlan, worker: Worker | None
) -> None:
    """Read what is local SGD's own, and say which worker's files this rank reads; all ranks call it.

    `worker` is None when the optimizers' states are not wanted.

    Raises:
        UserError: the checkpoint is one of another model, or lacks a file.
    """
    files.part = part_of(plan.source, plan.synced)
    summary = plan.summary
    if summary is None or worker is None:
        return
    groups, engine, values = worker.groups, worker.engine, worker.values
    refuse_other_model(summary["parameters"], shapes_of(values.view), f"--load {plan.directory}")
    if summary["tensors"]:
        plan.outer = fresh_like(engine, summary["tensors"], offloaded=engine.config.cpu_offload)
        _read(values, plan.outer, files.path(_name(_OUTER, groups, values), part=part_of(0, plan.synced)))
    if summary["own"]:
        plan.own = fresh_like(engine, summary["own"])
        _read(values, plan.own, files.path(_name(_OWN, groups, values)))


def _name(stem: str, groups: WorkerGroups, values: InnerValues) -> str:
    """Return the name of a file: where whole parameters are given to ranks, each has one, as Megatron's optimizer."""
    return f"{stem}_{groups.dp_cp.rank()}.pt" if values.is_layer_wise else f"{stem}.pt"


def part_of(worker: int, synced: bool) -> str:
    """Return the folder that a worker's files have for themselves; empty where Megatron looks."""
    return "" if synced and worker == 0 else f"local_sgd_worker_{worker}"


@torch.no_grad()
def _write(values: InnerValues, tensors: _Tensors, path: Path, writes: bool) -> None:
    """Write tensors like the values in the form in which Megatron writes the optimizer's; a worker's ranks call it."""
    states: list[Any] = []
    for index, member in enumerate(values.members):
        if is_distributed(member):
            # On its first data-parallel rank, where Megatron gathers the optimizer's own state, too.
            states.append(beside_view(member, values, tensors, index).get_parameter_state_dp_zero())
        else:
            states.append({name: _by_parameter(values, listed, index) for name, listed in tensors.items()})
    if writes:
        write_rank_file(states, path)


@torch.no_grad()
def _read(values: InnerValues, tensors: _Tensors, path: Path) -> None:
    """Read what `_write` wrote into `tensors`; a worker's ranks call it."""
    scattering = [not is_distributed(member) or member.data_parallel_group.rank() == 0 for member in values.members]
    states: list[Any] = [None] * len(values.members)
    if any(scattering):
        states = read_rank_file(
            path,
            "without which this run cannot resume",
            "the weights alone from a checkpoint of a sync point with --no-load-optim",
        )
    for index, (member, state) in enumerate(zip(values.members, states, strict=True)):
        if is_distributed(member):
            view = beside_view(member, values, tensors, index)
            view.load_parameter_state_from_dp_zero(state if scattering[index] else None)
            continue
        for name, listed in tensors.items():
            for parameter, tensor in _by_parameter(values, listed, index).items():
                tensor.copy_(state[name][parameter])


def _by_parameter(values: InnerValues, listed: list[torch.Tensor], member: int) -> dict[str, torch.Tensor]:
    return {
        value.entry.tensor.name: tensor.detach()
        for value, tensor in zip(values.values, listed, strict=True)
        if value.member == member
    }
