# SPDX-License-Identifier: Apache-2.0
"""Seam: checkpoints that a process beside the rank writes while training continues (`--async-save`).

What is written stays what it was when it was saved, workers do not wait for each other's writers, and the run ends with
an error when a writer does. Applied to runs of any feature that save so; the writing is Megatron's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import inspect
import os
import signal
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any

from megatron_ext.async_save.writer_process import MCORE, NVRX, Loop, WriterLoops, end_with
from megatron_ext.async_save.writer_watch import WatchedQueue, Writer, allow_open_files, newest_whole
from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install_extra
from megatron_ext.hooks import CutsWorkers, hooks
from megatron_ext.patching import Patch
from megatron_ext.run_options import run_options

__all__ = ["RESILIENCY_VERSIONS", "ending_with_its_rank", "is_asked", "missing_writer", "patches", "unused"]

RESILIENCY_VERSIONS = ">=0.6"
"""Releases of nvidia-resiliency-ext that Megatron 0.19 takes."""

_RESILIENCY = "nvidia-resiliency-ext"

_Finalize = Callable[..., None]


class _State:
    """What this rank knows of its saves; Megatron keeps it per process, too."""

    writer: Writer | None = None
    """From its start to its end."""

    finalize: _Finalize
    """Make what is written a checkpoint, on all ranks together: Megatron's function with errors for users."""


_state = _State()


def is_asked(args: Any) -> bool:
    """Return whether a run's checkpoints are written beside it.

    Args:
        args: Megatron's arguments as parsed, before Megatron validates and changes them.
    """
    return bool(args.async_save and args.use_persistent_ckpt_worker)


def unused(args: Any) -> str | None:
    """Return in words that `--async-save` has no effect, where that is so."""
    if not args.async_save or is_asked(args):
        return None
    return "--async-save has no effect without --use-persistent-ckpt-worker: training waits for every checkpoint"


def missing_writer(args: Any) -> str | None:
    """Return in words that the writer which the arguments ask for is not installed, and the way out."""
    if not is_asked(args) or args.async_strategy != "nvrx":
        return None
    from megatron.core.dist_checkpointing.strategies.nvrx import has_nvrx_async_support

    if not _has_resiliency():
        found = "is not installed"
    else:
        try:
            if has_nvrx_async_support():
                return None
            found = "lacks parts that Megatron needs"
        except AssertionError:  # Megatron's way to say it
            found = "is older"
    return (
        f"--async-save with --async-strategy nvrx, Megatron's default, needs {_RESILIENCY}{RESILIENCY_VERSIONS}, which "
        f"{found}; {pip_install_extra('async')}, or add --async-strategy mcore"
    )


def patches(loops: WriterLoops) -> list[Patch]:
    """Return the patches of this seam.

    Args:
        loops: what writers run on the backend in force.
    """
    records = [
        Patch(
            name="async-save/copy",
            target="megatron.core.dist_checkpointing.strategies.torch:TorchDistSaveShardedStrategy.async_save",
            wrap=_wrap_async_save,
            parameters=("self", "sharded_state_dict", "checkpoint_dir", "async_strategy"),
            rebind=False,
            reason="tensors in the host's memory are written without a copy, so that the next steps would change what "
            "is being written",
        ),
        Patch(
            name="async-save/finalize",
            target="megatron.training.async_utils:maybe_finalize_async_save",
            wrap=_wrap_finalize,
            parameters=("blocking", "terminate"),
            reason="all ranks ask each other before every step whether a checkpoint is written, where workers must not "
            "wait for each other; and a writer that is gone is waited for without end",
        ),
        Patch(
            name="async-save/meeting",
            target="megatron.training.training:checkpoint_and_decide_exit",
            wrap=_wrap_decide,
            parameters=("iteration",),
            serves=(CutsWorkers.may_exit,),
            reason="all ranks ask each other whether a checkpoint is written at the end of steps at which workers meet",
        ),
        *_writer_patches("mcore", MCORE, "_get_process", loops.mcore, _wrap_get_process),
    ]
    if _has_resiliency():
        of_the_extension = _writer_patches("nvrx", NVRX, "_start_worker", loops.nvrx, _wrap_start_worker)
        records += [
            dataclasses.replace(patch, distribution=_RESILIENCY, versions=RESILIENCY_VERSIONS)
            for patch in of_the_extension
        ]
    return records


def _writer_patches(
    strategy: str, upstream: Loop, starter: str, loop: Callable[..., None], watch: Callable[[Any], Any]
) -> list[Patch]:
    """Return the patches of one of Megatron's ways to write.

    Args:
        strategy: its name.
        upstream: its loop.
        starter: the method that starts a writer, of the loop's class.
        loop: what the writer runs instead.
        watch: wraps the starter.
    """
    owner = f"{upstream.module}:{upstream.owner}"
    return [
        Patch(
            name=f"async-save/{strategy}-loop",
            target=f"{owner}.{upstream.attribute}",
            wrap=lambda original: loop,
            parameters=("rank", "queue", "preload_q", "comp_q"),
            rebind=False,
            reason="a signal to all processes must not end the writer of the checkpoint that it asks for, and a writer "
            "ends with its rank, however that ends",
        ),
        Patch(
            name=f"async-save/{strategy}-answers",
            target=f"{upstream.queue_module}:get_write_results_queue",
            wrap=ending_with_its_rank,
            parameters=("mp_mode",),
            reason="a signal to all processes must not end the one that holds the queue of what writers report, and it "
            "ends with its rank, however that ends",
        ),
        Patch(
            name=f"async-save/{strategy}-writer",
            target=f"{owner}.{starter}",
            wrap=watch,
            parameters=("rank",),
            rebind=False,
            reason="whoever waits for a writer that is gone is told so instead",
        ),
    ]


def _has_resiliency() -> bool:
    return importlib.util.find_spec("nvidia_resiliency_ext") is not None


def _wrap_async_save(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def async_save(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import async_utils

        bound = signature.bind(*args, **kwargs)
        # The host's memory has room for one copy.
        async_utils.maybe_finalize_async_save(blocking=True)
        bound.arguments["sharded_state_dict"] = _own(bound.arguments["sharded_state_dict"])
        return original(*bound.args, **bound.kwargs)

    return async_save


def _own(state: Any) -> Any:
    """Return a state dict whose tensors in the host's memory, as far as this rank writes them, are nobody else's."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    def own(entry: Any) -> Any:
        is_written = isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id)
        if not is_written or entry.data is None or entry.data.device.type != "cpu":
            return entry
        entry = copy.copy(entry)
        entry.data = entry.data.detach().clone()
        return entry

    return dict_list_map_outplace(own, state)


def _wrap_finalize(original: _Finalize) -> _Finalize:
    @functools.wraps(original)
    def finalize(blocking: bool = False, terminate: bool = False) -> None:
        # torch derives it from BaseException.
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            original(blocking=blocking, terminate=terminate)
        except CheckpointException as error:
            causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
            raise UserError(
                f"--async-save: a checkpoint could not be written ({causes or 'another rank says why'}). "
                f"{newest_whole(run_options().save)}: remove the cause (what writers said is above) and resume from it"
            ) from error
        if terminate:
            _state.writer = None

    @functools.wraps(original)
    def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
        from megatron.training import async_utils

        if _state.writer is not None:
            _state.writer.require()
        if blocking or terminate or async_utils.is_empty_async_queue():
            finalize(blocking, terminate)

    _state.finalize = finalize
    return maybe_finalize_async_save


def _wrap_decide(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
        if hooks.may_exit(signature.bind(*args, **kwargs).arguments["iteration"]):
            _state.finalize()
        return original(*args, **kwargs)

    return checkpoint_and_decide_exit


def ending_with_its_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `get_write_results_queue`: the process that holds the queue ends when this rank does.

    It leaves SIGTERM to the rank.
    """

    @functools.wraps(original)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> Any:
        # A process begins with the signals blocked that its parent has blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        start = SyncManager.start
        # The process begins with what a manager is given to begin with, and Megatron gives it nothing.
        setattr(SyncManager, "start", functools.partialmethod(start, end_with, (os.getpid(),)))  # noqa: B010  # for mypy
        try:
            return original(*args, **kwargs)
        finally:
            setattr(SyncManager, "start", start)  # noqa: B010  # for mypy
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return get_write_results_queue


def _wrap_get_process(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_process(cls: Any, *args: Any, **kwargs: Any) -> Any:
        before = cls._persistent_process
        process = original(cls, *args, **kwargs)
        if process is not before:
            _watch(cls, process, ("_persistent_queue", "_persistent_preload_q", "_persistent_comp_q"))
        return process

    return get_process


def _wrap_start_worker(original: Callable[..., None]) -> Callable[..., None]:
    queues = ("queue", "preload_q", "comp_q")

    @functools.wraps(original)
    def start_worker(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in queues:  # of a writer before, they are used again
            queue = getattr(self, name)
            setattr(self, name, queue.queue if isinstance(queue, WatchedQueue) else queue)
        original(self, *args, **kwargs)
        _watch(self, self.process, queues)

    return start_worker


def _watch(owner: Any, process: Any, queues: tuple[str, ...]) -> None:
    allow_open_files()
    # The last one is that of the writer's answers.
    _state.writer = writer = Writer(process, getattr(owner, queues[-1]))
    for name in queues:
        setattr(owner, name, WatchedQueue(getattr(owner, name), writer))
