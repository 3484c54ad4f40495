# SPDX-License-Identifier: Apache-2.0
"""What local SGD writes into Megatron's sharded checkpoints (`--ckpt-format torch_dist`), and how it reads it back.

At a sync point the model stands where stock Megatron looks for it, with worker 0's inner optimizer and random
state; the other workers' optimizer and random state stand under `local_sgd.worker_<i>.`. In the middle of an
interval the workers hold different weights and every one of them, worker 0 too, stands under its prefix. Anchor
and outer optimizer stand under `local_sgd.outer.`, once, because they are equal on all workers. With a codec, so does
the replica of the anchor; what a worker alone has (what its messages lost, the anchor and outer state where rounds join
pairs of workers) always stands under its prefix.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.hooks import LoadContext, SaveContext
from megatron_ext.local_sgd.checkpoints.load_plan import SUMMARY, LoadPlan, fresh_like, shapes_of, summary_of
from megatron_ext.local_sgd.job.worker import Worker
from megatron_ext.local_sgd.taken_over import refuse_other_model
from megatron_ext.seams.sharded_state import (
    beside_optimizer,
    is_model_key,
    load_beside_optimizer,
    mark_as_copy,
    prefix_keys,
    split_plain,
)
from megatron_ext.worker_groups import WorkerGroups

__all__ = ["assemble", "request", "restore"]

_OUTER, _COMMON, _OWN = "local_sgd_outer", "local_sgd_common", "local_sgd_own"
# No slash: where Megatron checks a checkpoint strictly, it splits the keys of objects at one.
_OUTER_PREFIX = "local_sgd.outer."
_PER_WORKER = ("optimizer", "rng_state")
_PLAIN = ("optimizer", "opt_param_scheduler")


def assemble(context: SaveContext, worker: Worker, by_time: dict[str, Any] | None = None) -> None:
    """Turn the state dict that Megatron generated into that of a run with workers, in place.

    Args:
        context: of the save.
        worker: whose rank this is.
        by_time: state of the meetings, where workers meet by time; the same on all ranks.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state, engine, values = context.state, worker.engine, worker.values
    number = worker.groups.worker
    prefix = _worker_prefix(number)
    tensors = engine.tensor_state()
    model = {key: state[key] for key in state if is_model_key(key)}
    if number == 0 and tensors:
        state[_OUTER] = beside_optimizer(values, tensors, model, context.metadata, False, _OUTER_PREFIX)
    own = engine.worker_state()
    if own:
        state[_OWN] = beside_optimizer(values, own, model, context.metadata, False, f"{prefix}own.")
    state[SUMMARY] = summary_of(worker, tensors, own, by_time)
    for key in model:
        if not engine.synced:
            prefix_keys(state[key], prefix)
        elif number != 0:
            del state[key]
    if number == 0 and engine.synced:
        return
    for key in _PER_WORKER:
        if key in state:
            prefix_keys(state[key], prefix)
    if number != 0:
        plain = {key: split_plain(state[key]) for key in _PLAIN if key in state}
        state[_COMMON] = ShardedObject(f"{prefix}common", plain, (1,), (0,), replica_id=worker.groups.inside.rank())


def request(context: SaveContext, plan: LoadPlan, groups: WorkerGroups, worker: Worker | None) -> None:
    """Turn the request that Megatron generated into this worker's, in place.

    `worker` is None when the optimizers' states are not wanted.

    Raises:
        UserError: the checkpoint is one of another model.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state = context.state
    model = {key: state[key] for key in state if is_model_key(key)}
    plan.metadata = context.metadata
    if plan.summary is not None and worker is not None:
        engine, values = worker.engine, worker.values
        refuse_other_model(plan.summary["parameters"], shapes_of(values.view), f"--load {plan.directory}")
        if plan.summary["tensors"]:
            plan.outer = fresh_like(engine, plan.summary["tensors"], offloaded=engine.config.cpu_offload)
            state[_OUTER] = beside_optimizer(values, plan.outer, model, context.metadata, True, _OUTER_PREFIX)
            mark_as_copy(state[_OUTER], plan.worker)
        if plan.summary["own"]:
            plan.own = fresh_like(engine, plan.summary["own"])
            where = f"{_worker_prefix(plan.source)}own."
            state[_OWN] = beside_optimizer(values, plan.own, model, context.metadata, True, where)
            mark_as_copy(state[_OWN], plan.copy)
    for key, entry in state.items():
        apart = not plan.synced or plan.source != 0
        if is_model_key(key):
            apart = not plan.synced
        elif key not in _PER_WORKER:
            continue
        if apart:
            prefix_keys(entry, _worker_prefix(plan.source))
        mark_as_copy(entry, plan.worker if is_model_key(key) and plan.synced else plan.copy)
    if plan.source != 0 and context.optimizer is not None:
        replica = groups.inside.rank() + plan.copy * groups.inside.size()
        state[_COMMON] = ShardedObject(
            f"{_worker_prefix(plan.source)}common", None, (1,), (0,), replica_id=replica
        )


def restore(context: LoadContext, plan: LoadPlan, worker: Worker | None) -> bool:
    """Take local SGD's state out of what was read, in place; return whether an outer state was restored."""
    state = context.state
    summary = state.pop(SUMMARY, None)
    outer = state.pop(_OUTER, None)
    own = state.pop(_OWN, None)
    common = state.pop(_COMMON, None)
    if common is not None:
        for key, plain in common.items():
            state[key] = _overlay(state[key], plain) if key in state else plain
    wanted = not (context.args.no_load_optim or context.args.finetune)
    if summary is None or worker is None or not wanted:
        return False
    if outer is not None:
        load_beside_optimizer(worker.values, plan.outer, outer, plan.metadata)
    if own is not None:
        load_beside_optimizer(worker.values, plan.own, own, plan.metadata)
    worker.engine.load(plan.outer, summary, plan.own)
    plan.outer, plan.own = {}, {}
    return True


def _worker_prefix(worker: int) -> str:
    return f"local_sgd.worker_{worker}."


def _overlay(below: Any, above: Any) -> Any:
    """Return `below` with every leaf that `above` has replaced by it."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {
            **below,
            **{key: _overlay(below[key], value) if key in below else value for key, value in above.items()},
        }
    if isinstance(below, list) and isinstance(above, list) and len(below) == len(above):
        return [_overlay(left, right) for left, right in zip(below, above, strict=True)]
    return above
