# SPDX-License-Identifier: Apache-2.0
"""Run a command that the kernel kills when the process that started it dies, however that happens.

    python -S with_parent.py <pid of the parent> <command>

A program of its own and not subprocess's `preexec_fn`: that runs Python between fork and exec, where a library's
threads may come to life again while their files are being closed. gRPC's poller aborts there.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2); kept over exec


def with_parent(command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command no longer than this process."""
    return [sys.executable, "-S", __file__, str(os.getpid()), *command]


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def main() -> None:
    """Become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    end_with_parent()
    # The kernel tells only of a death that comes after it was asked to.
    if os.getppid() != parent:
        sys.exit("the process that was to be followed has ended")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
