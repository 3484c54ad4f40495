# SPDX-License-Identifier: Apache-2.0
"""The process that writes asynchronous checkpoints of a rank: what it does before Megatron's own loop.

Everything here runs in that process. It is started by spawning or by a fork server, so that what it is to run reaches
it by name.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_ext.async_save.writer_watch import allow_open_files

__all__ = ["LOOPS", "MCORE", "NVRX", "Loop", "WriterLoops", "end_with", "mcore_loop", "nvrx_loop"]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop of a writer, by its name: a patched function cannot be sent to another process."""

    module: str
    """Where it is."""

    owner: str
    """Its class."""

    attribute: str
    """What it is called there."""

    queue_module: str
    """Where the queue is made by which writers report."""

    release: str | None = None
    """Which method of the class lets go of what it holds of a GPU's memory, if that has to be said."""

    def run(self, *args: Any) -> None:
        """Answer signals and the end of the rank, then run the loop until the rank ends it.

        Args:
            args: what Megatron gives the loop.
        """
        allow_open_files()
        owner = getattr(importlib.import_module(self.module), self.owner)
        _obey_the_rank_alone(getattr(owner, self.release) if self.release else lambda: None)
        getattr(owner, self.attribute)(*args)


@dataclass(frozen=True, kw_only=True)
class WriterLoops:
    """What a writer runs, for each of Megatron's ways to write: functions at the top of a module."""

    mcore: Callable[..., None]
    """With `--async-strategy mcore`."""

    nvrx: Callable[..., None]
    """With `--async-strategy nvrx`."""


MCORE = Loop(
    module="megatron.core.dist_checkpointing.strategies.async_utils",
    owner="PersistentAsyncCaller",
    attribute="async_loop",
    queue_module="megatron.core.dist_checkpointing.strategies.filesystem_async",
)
NVRX = Loop(
    module="nvidia_resiliency_ext.checkpointing.async_ckpt.core",
    owner="PersistentAsyncCaller",
    attribute="async_loop_for_daemon_worker",
    queue_module="nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
    release="cleanup_worker_data_cache",
)


def mcore_loop(*args: Any) -> None:
    """Write until the rank says that it is done: Megatron's own writer."""
    MCORE.run(*args)


def nvrx_loop(*args: Any) -> None:
    """Write until the rank says that it is done: the writer of NVIDIA's resiliency extension."""
    NVRX.run(*args)


LOOPS = WriterLoops(mcore=mcore_loop, nvrx=nvrx_loop)


def _obey_the_rank_alone(release: Callable[[], None]) -> None:
    """Leave signals to the rank, and end when it ends.

    A batch system tells all processes of a job to end, and the rank's answer may be to save: with this writer. It ends
    the writer itself by the same signal, which then comes from the rank.

    Args:
        release: called before the writer ends by a signal.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Blocked, it waits for the thread below, whatever handler the loop sets.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_on_the_ranks_signal, args=(rank, release), daemon=True).start()
    assert rank.pid is not None
    end_with(rank.pid)


def _end_on_the_ranks_signal(rank: Any, release: Callable[[], None]) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
        continue
    release()
    os._exit(128 + signal.SIGTERM)


def end_with(rank: int) -> None:
    """Let this process end when a rank ends, however that ends.

    Args:
        rank: its process id.
    """
    threading.Thread(target=_end_when_gone, args=(rank,), daemon=True).start()


def _end_when_gone(rank: int) -> None:
    # The rank itself is watched, not a pipe to it: processes that were forked from it hold the pipe's other end open.
    with suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(rank)], [], [])
    os._exit(1)
