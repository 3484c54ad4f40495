# SPDX-License-Identifier: Apache-2.0
"""Processes that tokenize: how each begins, and how their results are waited for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor

__all__ = ["begin_process", "result_of"]

# How often to look whether a process has died while one waits for its result.
_WATCH_SECONDS = 5.0


def begin_process() -> None:
    """Prepare a process of a pool, before it loads a tokenizer."""
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The processes are the parallelism; a thread pool inside each would only fight for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def result_of[T](future: Future[T], executor: ProcessPoolExecutor) -> T:
    """Wait for a result.

    The pool notices the death of a process only between two messages. One that is killed while it sends a result, or
    holds a queue's lock, would be waited for without end; so the processes are looked at here as well.

    Raises:
        BrokenProcessPool: a process has died.
    """
    while True:
        # Private, because the pool does not show its processes, and cannot be made to fail from outside.
        processes = list((executor._processes or {}).values())
        died = any(process.exitcode is not None for process in processes)
        try:
            return future.result(timeout=_WATCH_SECONDS)
        except TimeoutError:
            if not died:
                continue
        for process in processes:
            process.kill()
        # No process can write any more; without this end of its own the pool's thread reads to the end and gives up.
        executor._result_queue._writer.close()  # type: ignore[attr-defined]  # private, and the only way
        return future.result()


def _end_with_parent() -> None:
    """End this process when the parent is gone: a killed parent cannot tell its pool to stop."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
