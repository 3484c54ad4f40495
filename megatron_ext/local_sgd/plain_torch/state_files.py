# SPDX-License-Identifier: Apache-2.0
"""Files of local SGD's state alone: one for each rank, or one for all."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.agreement import gather_at, refuse_together
from megatron_ext.local_sgd.plain_torch.averager import OuterOptimPeriodicModelAverager
from megatron_ext.local_sgd.plain_torch.parameters import local_part
from megatron_ext.local_sgd.plain_torch.post_local_sgd import StatefulPostLocalSGDOptimizer
from megatron_ext.local_sgd.plain_torch.whole_state import WholeLayout, gather_workers, of_worker, send_inside
from megatron_ext.local_sgd.taken_over import refuse_other_model
from megatron_ext.outer.digest import tensor_digest

__all__ = ["load_local_sgd_state_dict", "save_local_sgd_state_dict"]

_CPU = torch.device("cpu")


def save_local_sgd_state_dict(
    optimizer: StatefulPostLocalSGDOptimizer,
    save_dir: str | Path = "./local_sgd_ckpt",
    ckpt_name: str = "local_sgd_ckpt",
    *,
    group: dist.ProcessGroup | None = None,
    rank0_only: bool = True,
    full_state_dict: bool = False,
    cpu_offload: bool = True,
) -> Path:
    """Write local SGD's state, and return the file of this rank's; all ranks must call it.

    Args:
        optimizer: whose averager is saved.
        save_dir: folder, made when it does not exist.
        ckpt_name: beginning of the files' names.
        group: the ranks over which the model is sharded, for those who like to say it: the averager knows it.
        rank0_only: the first rank alone puts a full state together, because it alone writes. False is taken, and
            writes the same file.
        full_state_dict: False = a file for each rank, which as many ranks load. True = one file, written by the first
            rank, with whole tensors, which any number of shards loads.
        cpu_offload: whether whole tensors are moved to the host one by one as they are put together, so that a GPU need
            not hold all of them at once. Either way files can be read without a GPU.

    Raises:
        UserError: `group` is another one, weights were replaced since the state that belongs to them, parameters are
            cut in a way that has no whole tensors, or the full file cannot be written; on all ranks.
    """
    averager = optimizer.averager
    _agree(averager, lambda: _refuse_other_group(averager, group))
    state = averager.state_dict()
    if not full_state_dict:
        file = _file(save_dir, ckpt_name, full=False)
        _write(state, file)
        return file
    file = _file(save_dir, ckpt_name, full=True)
    layout = _agree(averager, lambda: _layout_to_save(averager, state))
    worker, is_first = dist.get_rank(averager.process_group), _is_first_of_worker(averager)
    is_writer = is_first and worker == 0
    mine = {
        **state,
        # The same for all workers, so that one puts it together.
        "common": {}
        if worker
        else layout.whole(state["common"], keep=is_writer, device=_CPU if cpu_offload else None),
        "own": layout.whole(state["own"], keep=is_first, device=_CPU),
        "parameters": layout.shapes,
        "weights": layout.digests(),
        "shards": 1,
    }
    whole = gather_workers(mine, averager.process_group, is_writer=is_writer) if is_first else {}
    _agree(averager, lambda: _write(whole, file) if is_writer else None)
    return file


def load_local_sgd_state_dict(
    optimizer: StatefulPostLocalSGDOptimizer,
    load_dir: str | Path = "./local_sgd_ckpt",
    ckpt_name: str = "local_sgd_ckpt",
    *,
    group: dist.ProcessGroup | None = None,
    rank0_only: bool = True,
    full_state_dict: bool = False,
) -> None:
    """Take over what `save_local_sgd_state_dict` wrote; all ranks must call it, after the parameters were loaded.

    Args:
        optimizer: whose averager takes it over.
        load_dir: the folder.
        ckpt_name: beginning of the files' names.
        group: the ranks over which the model is sharded, for those who like to say it: the averager knows it.
        rank0_only: whether the first rank of every worker alone reads a full state, and sends it to the others tensor
            by tensor; False = every rank reads the file.
        full_state_dict: what it was when the state was saved. A full state is loaded into any number of shards.

    Raises:
        UserError: `group` is another one, a file does not exist, cannot be read or was saved otherwise, or the state
            does not fit (see `OuterOptimPeriodicModelAverager.load_state_dict`).
    """
    averager = optimizer.averager
    _agree(averager, lambda: _refuse_other_group(averager, group))
    if not full_state_dict:
        averager.load_state_dict(_read(load_dir, ckpt_name, full=False))
        return
    file = _file(load_dir, ckpt_name, full=True)
    layout = _agree(averager, lambda: WholeLayout(averager.parameters))
    is_reader = not rank0_only or _is_first_of_worker(averager)

    def read() -> dict[str, Any] | None:
        if not is_reader:
            return None
        across = averager.process_group
        whole = _read(load_dir, ckpt_name, full=True)
        state = of_worker(whole, dist.get_rank(across), dist.get_world_size(across), str(file))
        refuse_other_model(state["parameters"], layout.shapes, "local SGD's saved state")
        return state

    state = _agree(averager, read)
    if rank0_only and averager.shard_group is not None:
        state = send_inside(state, averager.shard_group, layout.cut)
    else:
        assert state is not None
        for part in ("common", "own"):
            state[part] = {
                kind: [layout.cut(place, value) for place, value in enumerate(values)]
                for kind, values in state[part].items()
            }
    averager.load_state_dict(_for_this_rank(averager, layout, state))


def _for_this_rank(
    averager: OuterOptimPeriodicModelAverager, layout: WholeLayout, state: dict[str, Any]
) -> dict[str, Any]:
    """Return the state as if this rank had saved its shards; all ranks of a worker must call it."""
    inside = averager.shard_group
    local = {name: local_part(parameter) for name, parameter in averager.parameters.items()}
    digests = {name: list(tensor_digest([value])) for name, value in local.items()}
    return {
        **state,
        "parameters": {name: list(local[name].shape) for name in state["parameters"]},
        "weights": layout.fitted(state["weights"], digests),
        "place": [state["place"][0], 0 if inside is None else dist.get_rank(inside)],
        "shards": 1 if inside is None else dist.get_world_size(inside),
    }


def _agree[T](averager: OuterOptimPeriodicModelAverager, act: Callable[[], T]) -> T:
    """Return what `act` does on this rank; all ranks must call it, and all refuse what one of them does."""
    problems: list[str] = []
    try:
        found = act()
    except UserError as error:
        problems.append(str(error))
    across, inside = averager.process_group, averager.shard_group
    refuse_together(gather_at("local SGD's files", problems, across, inside), problems)
    return found


def _refuse_other_group(averager: OuterOptimPeriodicModelAverager, group: dist.ProcessGroup | None) -> None:
    if group is None:
        return
    inside = averager.shard_group
    own = [dist.get_rank()] if inside is None else dist.get_process_group_ranks(inside)
    given = dist.get_process_group_ranks(group)
    if given != own:
        raise UserError(
            f"group has the ranks {given}, and this worker's model is on {own}; give the averager's shard_group, or "
            "None"
        )


def _layout_to_save(averager: OuterOptimPeriodicModelAverager, state: dict[str, Any]) -> WholeLayout:
    for name, parameter in averager.parameters.items():
        if list(tensor_digest([local_part(parameter)])) != list(state["weights"][name]):
            raise UserError(
                f"full_state_dict: parameter {name} was replaced since the last step, and the state belongs to its "
                "former values; save before loading others"
            )
    return WholeLayout(averager.parameters)


def _is_first_of_worker(averager: OuterOptimPeriodicModelAverager) -> bool:
    return averager.shard_group is None or dist.get_rank(averager.shard_group) == 0


def _write(state: dict[str, Any], file: Path) -> None:
    partial = file.with_suffix(".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial)
        partial.replace(file)
    except (OSError, RuntimeError) as error:  # torch's writer says the latter where a disk is full
        raise UserError(f"{file}: cannot be written ({error}); make room, or give another save_dir") from error


def _read(folder: str | Path, name: str, *, full: bool) -> Any:
    file, other = _file(folder, name, full=full), _file(folder, name, full=not full)
    if not file.is_file():
        if other.is_file():
            raise UserError(f"{file}: no such file, but {other.name} is there; load it with full_state_dict={not full}")
        needed = "" if full else "; local SGD's state is loaded on as many ranks as saved it"
        raise UserError(f"{file}: no such file{needed}")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, struct.error, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: cannot be read as local SGD's state ({error}); restore it from a copy") from error


def _file(folder: str | Path, name: str, *, full: bool) -> Path:
    return Path(folder) / (f"{name}.pt" if full else f"{name}_rank{dist.get_rank()}.pt")
