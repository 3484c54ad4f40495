# SPDX-License-Identifier: Apache-2.0
"""Seam: the queue by which the writers of a checkpoint report, which a process of its own holds."""

from __future__ import annotations

import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any

from megatron_ext.patching import Patch

__all__ = ["patches"]

_MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def patches() -> list[Patch]:
    """Return the patches of this seam; they are applied whatever the arguments ask for."""
    return [
        Patch(
            name="repairs/writers-queue",
            target=f"{_MODULE}:get_write_results_queue",
            wrap=_wrap_queue,
            parameters=("mp_mode",),
            reason="a signal to all processes (torchrun, SLURM) ends the queue's, too, and so the checkpoint that "
            "--exit-signal-handler is to save; a queue that is gone is rebuilt. Its process unpacks all that passes, "
            "and imports torch for that while the first save waits, 330 MB per rank; it is given bytes",
        )
    ]


def _wrap_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> Any:
        module: Any = importlib.import_module(_MODULE)
        if module._results_queue is not None and not _answers(module._results_queue):
            module._results_queue = None
        return _QueueOfBytes(original(*args, **kwargs))

    return get_write_results_queue


def _answers(queue: Any) -> bool:
    try:
        queue.qsize()
    except (EOFError, OSError):
        return False
    return True


class _QueueOfBytes:
    """A queue whose items are packed before they pass the process that holds it.

    Args:
        queue: the proxy of the queue in that process.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, item: Any) -> None:
        self._queue.put(pickle.dumps(item))

    def get_nowait(self) -> Any:
        return pickle.loads(self._queue.get_nowait())
