# SPDX-License-Identifier: Apache-2.0
"""Processes that run in parallel: each with a log, which is read while it grows, and none left behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stages import PATIENCE_SECONDS, StageError, log_tail  # of the other quickstart
from with_parent import with_parent  # likewise

__all__ = ["Job"]

VANISH_SECONDS = 2.0
"""How long killed processes may be ending; they need milliseconds, and more on a busy machine."""


class Job:
    """A process, and those that take its place after it."""

    def __init__(self, name: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Prepare.

        Args:
            name: for people.
            log: file that receives what all of them write; replaced.
            environment: environment variables; this process's own when None.
        """
        self.name = name
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        self._read = 0

    def start(self, command: Sequence[str]) -> None:
        """Start a process; the one before must have ended."""
        assert self._process is None or self._process.poll() is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                with_parent(command),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C reaches the quickstart alone, which then ends everything in order.
                start_new_session=True,
            )

    @property
    def runs(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise a StageError, with the end of the log, if the process ended with an error."""
        status = None if self._process is None else self._process.poll()
        if status not in (None, 0):
            tail = "".join(f"\n    {line}" for line in log_tail(self._log))
            raise StageError(f"{self.name} failed with exit status {status}; the end of {self._log}:{tail}")

    def lines(self) -> Iterator[str]:
        """Yield the whole lines that were written since this was asked the last time."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield line.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process with SIGKILL, as a power cut would."""
        assert self._process is not None
        self._kill_group()

    def stop(self) -> None:
        """End the process, if need be by force, and what it has started, such as Megatron's writers of checkpoints."""
        if self._process is None or self._process.poll() == 0:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_SECONDS)
        self._kill_group()

    def _kill_group(self) -> None:
        """End the process and what it has started; returns when they are gone."""
        assert self._process is not None
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        # Nobody here can wait for its children. Where process 1 does not either, they stay in the group as zombies.
        deadline = time.monotonic() + VANISH_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.01)
