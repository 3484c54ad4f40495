# SPDX-License-Identifier: Apache-2.0
"""Writers of asynchronous checkpoints that start at once, and that hold what they write until a gate is opened."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.presets import Options
from tests.support.waiting import until

__all__ = [
    "ASYNC",
    "WITH_THE_EXTENSION",
    "at_step",
    "close_gate",
    "end_at_the_first_tensor",
    "fill_the_disk",
    "give_what_cannot_be_sent",
    "hold_writes",
    "kill_writer",
    "let_write",
    "make_the_queue_again",
    "needs_the_extension",
    "open_gate",
    "queue_process",
    "start_writers_at_once",
    "wait_for_the_writer",
    "writer_process",
]

ASYNC: Options = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}
WITH_THE_EXTENSION: Options = {**ASYNC, "async_strategy": "nvrx"}
WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
LONGEST_SECONDS = 100.0

needs_the_extension = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None, reason="needs nvidia-resiliency-ext"
)


def start_writers_at_once() -> None:
    """Before: let this rank's writer come from the fork server that the rank came from, which has imported Megatron.

    It starts one of its own otherwise, or spawns its writer.
    """
    from multiprocessing import forkserver

    import torch.multiprocessing

    original = torch.multiprocessing.get_context
    forkserver._forkserver.ensure_running = lambda: None
    torch.multiprocessing.get_context = lambda method=None: original("forkserver" if method == "spawn" else method)


def hold_writes(gate: str) -> None:
    """Before: let writers wait for a file to appear, after they have taken what they are to write.

    Args:
        gate: the file. The writer of each rank leaves its process id in `gate.RANK` when it begins to wait.
    """
    _replace_work(write=functools.partial(write_after, gate))


def write_after(gate: str, write: Callable[..., None], rank: int, *rest: Any) -> None:
    """In the writer: wait, then write."""
    Path(f"{gate}.{rank}").write_text(str(os.getpid()))
    end = time.monotonic() + LONGEST_SECONDS
    while not os.path.exists(gate):
        assert time.monotonic() < end, f"{gate} was not opened"
        time.sleep(0.01)
    write(rank, *rest)


def open_gate(gate: str) -> None:
    """Let writers write."""
    Path(gate).touch()


def let_write(gate: str) -> None:
    """Let the writer of this rank write, and wait until it has."""
    open_gate(gate)
    wait_for_the_writer()


def close_gate(gate: str) -> None:
    """Let writers wait again."""
    Path(gate).unlink(missing_ok=True)


def at_step(iteration: int, act: Callable[[], object]) -> None:
    """Before: do something on this rank at the beginning of a training step.

    Args:
        iteration: of the step, counted from 0.
        act: what to do.
    """
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if kwargs["iteration"] == iteration:
            act()
        return original(*args, **kwargs)

    training.train_step = train_step


def fill_the_disk() -> None:
    """Before: let writers write to a disk without room."""
    _replace_work(write=write_to_a_full_disk)


def end_at_the_first_tensor() -> None:
    """Before: let writers end while they take over what they are to write."""
    _replace_work(preload=end_now)


def give_what_cannot_be_sent() -> None:
    """Before: let ranks give their writers what no other process can take."""
    _replace_work(write=lambda write, *args: write(*args))


def write_to_a_full_disk(write: Callable[..., None], rank: int, buckets: Any, results: Any) -> None:
    """In the writer: write to a device that never has room."""
    write(rank, [("/dev/full", name, content) for _, name, content in buckets], results)


def end_now(preload: Callable[..., Any]) -> None:
    """In the writer: end as out of memory does, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def writer_process() -> Any:
    """Return the writer of this rank."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.training import async_utils

    caller = getattr(async_utils._async_calls_queue, "persistent_caller", None)
    return PersistentAsyncCaller._persistent_process if caller is None else caller.process


def make_the_queue_again() -> None:
    """Let the run make the queue by which writers report: the harness has made one before anything was patched."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = None
    filesystem_async.get_write_results_queue("fork")


def queue_process() -> Any:
    """Return the process that holds the queue by which writers report."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    return filesystem_async._results_queue._manager._process


def wait_for_the_writer() -> None:
    """Wait until the writer of this rank has said that it has written what it was given."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    until(lambda: not PersistentAsyncCaller._persistent_comp_q.empty(), "the writer")


def kill_writer() -> None:
    """End the writer of this rank as out of memory does, and wait until it has ended."""
    writer = writer_process()
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()


def _replace_work(write: Callable[..., None] | None = None, preload: Callable[..., Any] | None = None) -> None:
    """Let functions of this module do what writers do; they get Megatron's own as their first argument."""
    for module in WRITERS:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            _replace_work_of(importlib.import_module(module).FileSystemWriterAsync, write, preload)


def _replace_work_of(kind: Any, write: Callable[..., None] | None, preload: Callable[..., Any] | None) -> None:
    original = kind.get_save_function_and_args

    @functools.wraps(original)
    def replaced(self: Any) -> Any:
        own_write, own_preload, args = original(self)
        return (
            functools.partial(write, own_write) if write else own_write,
            functools.partial(preload, own_preload) if preload else own_preload,
            args,
        )

    kind.get_save_function_and_args = replaced
