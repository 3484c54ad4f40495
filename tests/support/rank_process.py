# SPDX-License-Identifier: Apache-2.0
"""The side of `run_ranks` that lives in a rank: set up, call the function, report, wait for the release."""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

STACK_DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the Python stacks of all its threads to `stacks_path`, also while it hangs in C code."""


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """One rank of one call of `run_ranks`."""

    rank: int
    world_size: int
    master_port: int
    directory: Path
    """Where the rank writes its standard output, standard error and stacks."""
    payload: bytes
    """The pickled call, unpickled under capture so that an import error is reported."""
    environment: dict[str, str]
    """The caller's environment: a forked rank would otherwise see that of the fork server's start."""

    @property
    def stdout_path(self) -> Path:
        """The file that holds what the rank wrote to file descriptor 1."""
        return self.directory / f"rank{self.rank}.stdout"

    @property
    def stderr_path(self) -> Path:
        """The file that holds what the rank wrote to file descriptor 2."""
        return self.directory / f"rank{self.rank}.stderr"

    @property
    def stacks_path(self) -> Path:
        """The file that holds the stacks which `STACK_DUMP_SIGNAL` asked for."""
        return self.directory / f"rank{self.rank}.stacks"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """How the function ended, sent once."""

    exit_code: int
    """What a script that ended this way would have exited with."""
    value: bytes = b""
    """The pickled result of a function that returned."""
    traceback: str = ""
    """The traceback of a function that raised."""
    ended_at: float = field(default_factory=time.monotonic)
    """Seconds on the machine's monotonic clock: the first failure explains the others."""


def rank_main(job: RankJob, channel: Connection) -> None:
    """Run one rank; the target of its process."""
    os.setsid()  # own process group: the harness ends the rank together with whatever it started
    _capture_output(job)
    _set_environment(job)
    # This process would start others as it was started itself. A rank of torchrun starts them as the platform does,
    # which data loaders need: what theirs run cannot be pickled.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    released = threading.Event()
    threading.Thread(target=_watch_harness, args=(channel, released), daemon=True).start()
    report = _call(job.payload)
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send_bytes(pickle.dumps(report))
    # A rank that left early would take its sockets, and rank 0 the store, from ranks that still work.
    released.wait()


def _capture_output(job: RankJob) -> None:
    for path, descriptor in ((job.stdout_path, 1), (job.stderr_path, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    # A rank that is killed should have said what it did.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # lives as long as the process
    stacks = open(job.stacks_path, "w")  # noqa: SIM115  # faulthandler writes to it until the process ends
    faulthandler.register(STACK_DUMP_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=2)


def _set_environment(job: RankJob) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.master_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.update(_for_gpus(job))


def _for_gpus(job: RankJob) -> dict[str, str]:
    """What ranks on GPUs need: as Megatron asks for; and nodes of their own where there are fewer GPUs than ranks.

    NCCL refuses two ranks on one GPU of a node. Those of several nodes talk through sockets.
    """
    import torch

    devices = torch.cuda.device_count()  # asks the driver, so that the process can still fork
    if devices == 0:
        return {}
    order = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if devices >= job.world_size:
        return order
    return {
        **order,
        "LOCAL_RANK": str(job.rank % devices),
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"rank{job.rank}",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def _watch_harness(channel: Connection, released: threading.Event) -> None:
    try:
        channel.recv_bytes()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)  # the harness is gone: nobody else would end this rank
    released.set()


def _call(payload: bytes) -> RankReport:
    try:
        # The fork server swallows an import error of its preload; here it is raised.
        importlib.import_module("tests.support.preload")
        call = pickle.loads(payload)
        value = pickle.dumps(call())
        return RankReport(exit_code=0, value=value)
    except SystemExit as exit_request:
        return _report_system_exit(exit_request)
    except BaseException as error:  # KeyboardInterrupt too: the harness decides, a rank only reports
        # What the interpreter does: the package has a hook of its own for the user's mistakes.
        sys.excepthook(type(error), error, error.__traceback__)
        return RankReport(exit_code=1, traceback=traceback.format_exc())


def _report_system_exit(exit_request: SystemExit) -> RankReport:
    """Follow the interpreter: no code is 0, an integer is itself, anything else is printed and becomes 1."""
    if exit_request.code is None or exit_request.code == 0:
        return RankReport(exit_code=0, value=pickle.dumps(None))
    if isinstance(exit_request.code, int):
        return RankReport(exit_code=exit_request.code, traceback=traceback.format_exc())
    print(exit_request.code, file=sys.stderr)
    return RankReport(exit_code=1, traceback=traceback.format_exc())
