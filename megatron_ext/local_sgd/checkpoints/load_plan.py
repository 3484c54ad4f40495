# SPDX-License-Identifier: Apache-2.0
"""What local SGD says of itself in a checkpoint, and so where a worker's state is in it, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.hooks import LoadContext
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.engine import LocalSGD
from megatron_ext.local_sgd.job.worker import Worker
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.local_sgd.taken_over import changes, method_of, refuse_other_method, tuning_of
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.params import ParameterView
from megatron_ext.params.gpt import OUTPUT_WEIGHT, WORD_EMBEDDING
from megatron_ext.phrases import plural

__all__ = ["SUMMARY", "LoadPlan", "fresh_like", "plan_load", "refuse_without_workers", "shapes_of", "summary_of"]

SUMMARY = "local_sgd"
"""The key under which it is in a checkpoint's common state."""

_FORMAT = 5


@dataclass(kw_only=True)
class LoadPlan:
    """Where this worker's state is in a checkpoint."""

    directory: str | None
    """The iteration's directory."""

    summary: dict[str, Any] | None
    """What local SGD wrote about itself, None for a checkpoint of stock Megatron."""

    worker: int
    """This rank's worker."""

    workers: int
    """Workers of this run."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """The content metadata that shaped the request."""

    outer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """The tensors into which anchor and outer state are read; empty when they are not wanted."""

    own: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """The tensors into which is read what the worker alone has; empty when there is nothing."""

    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """By flag, the value of the run that saved and that of this run, where a run may change it."""

    @property
    def saved_workers(self) -> int:
        """W of the run that saved."""
        return int(self.summary["workers"]) if self.summary else 1

    @property
    def synced(self) -> bool:
        """Whether the model stands at its canonical place."""
        return self.summary is None or bool(self.summary["synced"])

    @property
    def source(self) -> int:
        """The worker whose inner state this worker takes over: i mod W of the run that saved."""
        return self.worker % self.saved_workers

    @property
    def copy(self) -> int:
        """How many workers before this one read the same inner state."""
        return self.worker // self.saved_workers

    def describe(self) -> str:
        """Return what will be loaded, in one line."""
        if self.summary is None:
            return "local SGD: a checkpoint without local-SGD state: all workers start from it with a fresh outer state"
        into, rounds = self.summary["steps_since_sync"], self.summary["rounds"]
        place = "at a sync point" if self.synced else f"{plural(into, 'step')} after a sync point"
        line = f"local SGD: a checkpoint of {self.saved_workers} workers, saved {place} (round {rounds})"
        if self.saved_workers != self.workers:
            line += f"; worker i takes the inner state of worker i mod {self.saved_workers}"
        for flag, (before, now) in self.changed.items():
            line += f"; {flag} was {before} and is {now} from here on"
        return line


def summary_of(
    worker: Worker, tensors: Iterable[str], own: Iterable[str], by_time: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what local SGD writes about itself, the same on all ranks; after `tensor_state` of the engine.

    Args:
        worker: that is saved.
        tensors: names in its engine's `tensor_state`.
        own: names in that one's `worker_state`.
        by_time: state of the meetings, where workers meet by time.
    """
    engine = worker.engine
    return {
        "format": _FORMAT,
        "workers": worker.groups.num_workers,
        "interval": engine.config.local_sgd_sync_interval,
        "synced": engine.synced,
        "drifts": engine.drifts,
        "method": method_of(engine.config, engine.outer, engine.gta, engine.streaming),
        "tuning": tuning_of(engine.config, engine.outer),
        "tensors": list(tensors),
        "own": list(own),
        "parameters": shapes_of(worker.values.view),
        "by_time": by_time,
        **engine.scalar_state(),
    }


def plan_load(context: LoadContext, workers: int, worker: int) -> LoadPlan:
    """Decide from a checkpoint's common state what this worker will read.

    Raises:
        UserError: the checkpoint cannot be loaded by this run, with the way out.
    """
    summary = context.state.get(SUMMARY)
    plan = LoadPlan(directory=context.directory, summary=summary, worker=worker, workers=workers)
    if summary is None:
        return plan
    where = f"--load {context.directory}"
    if summary.get("format") != _FORMAT:
        raise UserError(
            f"{where}: local-SGD state of format {summary.get('format')}, this version reads format {_FORMAT}; "
            "use the version of megatron_ext that saved it"
        )
    args = context.args
    if not plan.synced:
        into = plural(summary["steps_since_sync"], "step")
        rest = f"saved {into} after a sync point, where every worker has its own weights"
        if plan.saved_workers != workers:
            raise UserError(
                f"{where}: {rest}, so it needs --local-sgd-workers {plan.saved_workers}, not {workers}. To change the "
                f"number of workers, resume with {plan.saved_workers} up to a sync point "
                f"({_next_sync_point(summary, context.state['iteration'])}), save there, and load that"
            )
        if args.no_load_optim or args.finetune:
            # --skip-train sets --no-load-optim.
            option = "--finetune" if args.finetune else "--skip-train" if args.skip_train else "--no-load-optim"
            raise UserError(
                f"{where}: {rest}, which {option} would discard; load a checkpoint that was saved at a sync point"
            )
    if not (args.no_load_optim or args.finetune):
        config, outer = LocalSGDConfig.from_args(args), OuterOptimizerConfig.from_args(args)
        streaming = StreamingConfig.from_args(args)
        method = method_of(config, outer, GTAConfig.from_args(args), streaming)
        refuse_other_method(
            summary["method"],
            method,
            where,
            "resume with what it was, or start with fresh optimizer states from a sync point (--no-load-optim)",
        )
        plan.changed = changes(summary["tuning"], tuning_of(config, outer))
        # An eager round has no end that could be missed.
        under_way = not streaming.eager and any(entry["on_its_way"] for entry in summary["fragments"])
        if under_way and summary["interval"] != config.local_sgd_sync_interval:
            raise UserError(
                f"{where}: saved while rounds of fragments were in flight, so that --local-sgd-sync-interval has to "
                f"be {summary['interval']}, not {config.local_sgd_sync_interval}; load a checkpoint without any"
            )
        # A peer that a sync service has sent back is out of it for good.
        went_back = getattr(args, "sync_service", None) is not None
        place, said = context.state.get("iteration", 0), "its iteration"
        if getattr(args, "override_ckpt_iteration", None) is not None:
            place, said = args.override_ckpt_iteration, "--override-ckpt-iteration"
        if not summary["in_warmup"] and place < args.local_sgd_warmup_steps and not went_back:
            raise UserError(
                f"{where}: saved after warm-up had ended, and --local-sgd-warmup-steps {args.local_sgd_warmup_steps} "
                f"lies beyond {said} {place}; give the value of the run that saved it, or that iteration"
            )
    return plan


def refuse_without_workers(context: LoadContext) -> None:
    """Refuse a checkpoint from the middle of an interval to a run without workers.

    Raises:
        UserError: with the way out.
    """
    summary = context.state.get(SUMMARY)
    if summary is None or summary["synced"]:
        return
    into = plural(summary["steps_since_sync"], "step")
    raise UserError(
        f"--load {context.directory}: saved {into} after a sync point, where each of "
        f"{summary['workers']} workers has its own weights, so it needs --use-local-sgd --local-sgd-workers "
        f"{summary['workers']}. To run without, resume with them up to a sync point "
        f"({_next_sync_point(summary, context.state['iteration'])}), save there, and load that"
    )


def _next_sync_point(summary: dict[str, Any], iteration: int) -> str:
    """Return where a run's workers become equal, given the iteration at which it was saved."""
    point = "the last of --train-iters"
    if summary["method"]["--local-sgd-use-async"]:
        point = "the next meeting with --local-sgd-min-total-global-steps, or the end"
    elif not summary["drifts"]:
        point = f"iteration {iteration + summary['interval'] - summary['steps_since_sync']}"
    # Megatron refuses another length of the schedule otherwise.
    return f"{point}; where --train-iters has to grow for it, add --override-opt_param-scheduler"


def fresh_like(engine: LocalSGD, names: Iterable[str], offloaded: bool = False) -> dict[str, list[torch.Tensor]]:
    """Return tensors by name, like the engine's values, into which a state is read; in host memory if `offloaded`."""
    at = torch.device("cpu") if offloaded else None
    return {
        name: [torch.empty_like(value, requires_grad=False, device=at) for value in engine.values] for name in names
    }


def shapes_of(view: ParameterView) -> dict[str, list[int]]:
    """Return the global shape of every parameter of the model by global name, without the vocabulary's rows.

    How far a vocabulary is padded depends on the layout.
    """
    return {
        tensor.name: list(tensor.shape[1:] if tensor.name in (WORD_EMBEDDING, OUTPUT_WEIGHT) else tensor.shape)
        for tensor in view.placement.tensors
    }
