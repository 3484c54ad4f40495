# SPDX-License-Identifier: Apache-2.0
"""Seam: the queues between a rank and the writer of its asynchronous checkpoints, with an eye on the writer.

Megatron waits at them without end for a writer that is gone.
"""

from __future__ import annotations

import resource
import threading
from queue import Empty
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.run_options import run_options

__all__ = ["WatchedQueue", "Writer", "allow_open_files", "newest_whole"]

_LOOK_SECONDS = 0.1
_LAST_WORDS_SECONDS = 2.0
"""How long what a writer had sent before it ended may take to arrive."""


def newest_whole(folder: str) -> str:
    """Return in words where the newest whole checkpoint is.

    Args:
        folder: of `--save`.
    """
    return f"latest_checkpointed_iteration.txt in --save {folder} names the newest whole checkpoint"


def allow_open_files() -> None:
    """Let this process have as many open files as its limits allow it to ask for.

    torch hands every tensor of the host's memory to another process by an open file.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Writer:
    """The writer of a rank, and whether it still writes."""

    def __init__(self, process: Any, answers: Any) -> None:
        """Watch a writer.

        Args:
            process: the `multiprocessing` process, started by this one.
            answers: the queue by which it says what it has written, or that it could not.
        """
        self._process = process
        self._answers = answers
        self._unsent: Exception | None = None
        self.given_up = False
        """Whether its end has been said: what Megatron then does to end it comes to nothing."""

    def cannot_send(self, error: Exception, item: object) -> None:
        """Note that something did not reach the writer, which would be waited for without end.

        Args:
            error: why.
            item: what.
        """
        self._unsent = error

    @property
    def alive(self) -> bool:
        """Whether the process is there, and has got what it was sent."""
        return self._unsent is None and bool(self._process.is_alive())

    def require(self) -> None:
        """Make sure that the writer is there, or has left an answer.

        Raises:
            UserError: it is gone.
        """
        if not self.alive and self._answers.empty():
            self.give_up()

    def give_up(self) -> None:
        """Say that the writer is gone; no further call says it again.

        Raises:
            UserError: the first time.
        """
        if self.given_up:
            return
        self.given_up = True
        whole = newest_whole(run_options().save)
        if self._unsent is not None:
            raise UserError(
                f"--async-save: a checkpoint did not reach the process that writes it ({self._unsent}). {whole}: "
                "remove the cause (where files are too many, their limit: ulimit -n) and resume from it"
            )
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        raise UserError(
            f"--async-save: the process that writes checkpoints has ended ({how}; what it said is above), and what it "
            f"was writing is lost. {whole}: remove the cause (memory, disk) and resume from it"
        )


class WatchedQueue:
    """One of these queues: whoever waits at it hears of it when the writer ends."""

    def __init__(self, queue: Any, writer: Writer) -> None:
        """Wrap a queue.

        Args:
            queue: a `multiprocessing` queue.
            writer: who is at its other end.
        """
        self.queue = queue
        self._writer = writer
        queue._on_queue_feeder_error = writer.cannot_send

    def __getattr__(self, name: str) -> Any:
        """Return what the queue has besides."""
        return getattr(self.queue, name)

    def put(self, item: Any) -> None:
        """Send something to the writer.

        Raises:
            UserError: it is gone.
        """
        if self._writer.alive:
            self.queue.put(item)
        else:
            self._writer.give_up()

    def join(self) -> None:
        """Wait until the writer has done all that it was sent.

        Raises:
            UserError: it is gone.
        """
        # A writer that ends in the middle may hold the queue's locks forever: only a thread may wait for them.
        waiting = threading.Thread(target=self.queue.join, daemon=True)
        waiting.start()
        while waiting.is_alive() and self._writer.alive:
            waiting.join(_LOOK_SECONDS)
        waiting.join(0.0 if self._writer.given_up else _LAST_WORDS_SECONDS)
        if waiting.is_alive():
            self._writer.give_up()

    def get_nowait(self) -> Any:
        """Return what the writer has sent.

        Raises:
            Empty: nothing yet.
            UserError: nothing, and it is gone.
        """
        alive = self._writer.alive
        try:
            return self.queue.get(timeout=None if alive else _LAST_WORDS_SECONDS, block=not alive)
        except Empty:
            if not alive:
                self._writer.give_up()
            raise
