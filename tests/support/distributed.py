# SPDX-License-Identifier: Apache-2.0
"""`run_ranks`: call a function in several processes at once, and never lose an error or a process.

The processes are forked from a server that has imported torch and Megatron once (`tests.support.preload`).
"""

import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.support.processes import group_exists, group_members
from tests.support.rank_process import STACK_DUMP_SIGNAL, RankJob, RankReport, rank_main

REPOSITORY = Path(__file__).resolve().parents[2]
TAIL_CHARACTERS = 4000
FATAL = "Fatal Python error"
"""What faulthandler writes first when a signal ends a process."""
EXIT_SECONDS = 5.0
QUICK_EXIT_SECONDS = 0.5
"""How long a rank may take to end after its release, and what it started after that."""
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

CONTEXT = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
_servers: dict[Path, forkserver.ForkServer] = {}
"""Beside the usual one, by the folder whose packages their ranks find."""


class RankFailure(Exception):
    """A rank raised, died, hung or left processes behind; the message holds what is known about it."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank ended."""

    rank: int
    exit_code: int | None
    """As a script's would be: 0 for a return, negative for a signal; None when the harness ended the rank."""
    value: Any
    """What the function returned."""
    traceback: str
    """The traceback of a function that raised, else empty."""
    stdout: str
    stderr: str
    ended_at: float
    """Seconds on the machine's monotonic clock; infinite without a report."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    expect_failure: bool = False,
    failure_grace: float = 5.0,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in `world_size` processes with torchrun's environment variables set.

    Return plain data: unpickling a tensor imports Megatron into the caller's process (some 8 s, once).

    Args:
        function: a picklable callable (defined at the top level of its module) whose result can be pickled.
        world_size: number of processes, each with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        args: positional arguments of the function.
        timeout: seconds until all ranks are killed, with their stacks in the error.
        expect_failure: for tests of bad input: at least one rank must fail; returns a `RankExit` per rank.
        failure_grace: with `expect_failure`, seconds that the other ranks get after the first failure.
        kwargs: keyword arguments of the function.

    Returns:
        The results in the order of ranks (None for `sys.exit(0)`); or `RankExit` with `expect_failure`.

    Raises:
        RankFailure: a rank failed (or, with `expect_failure`, none did), timed out or left processes behind.
    """
    call = partial(function, *args, **kwargs)
    if expect_failure:
        return run_failing_ranks(call, world_size, timeout=timeout, failure_grace=failure_grace)
    return [rank_exit.value for rank_exit in run_successful_ranks(call, world_size, timeout=timeout)]


def run_successful_ranks(call: Callable[[], Any], world_size: int, *, timeout: float) -> list[RankExit]:
    """As `run_ranks`, with each rank's output beside its result."""
    # The grace is enough for the report of a rank that failed on its own at the same time.
    exits = _run(call, world_size, timeout, grace=0.3)
    failed = [rank_exit for rank_exit in exits if rank_exit.exit_code != 0]
    if failed:
        raise RankFailure(_describe(_most_telling(failed)))
    return exits


def run_failing_ranks(
    call: Callable[[], Any], world_size: int, *, timeout: float, failure_grace: float = 5.0
) -> list[RankExit]:
    """As `run_ranks` with `expect_failure`."""
    exits = _run(call, world_size, timeout, failure_grace)
    if all(rank_exit.exit_code == 0 for rank_exit in exits):
        raise RankFailure("a failure was expected, but every rank returned:\n" + _describe(exits[0]))
    return exits


def warm_up() -> None:
    """Start the fork server, which then imports in the background; does nothing when it runs already."""
    CONTEXT.set_forkserver_preload(["tests.support.preload"])
    with _server_environment():
        forkserver.ensure_running()


@contextmanager
def server_with_packages(folder: Path) -> Iterator[None]:
    """Fork ranks from a server of their own that finds the packages of this folder besides.

    What can be imported decides what Megatron's modules contain once they are, so that ranks of the usual server come
    too late. Each server imports once, and stays until the session ends: other modules want it, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        server = _servers.setdefault(folder, forkserver.ForkServer())
        # The module has one server, whose methods are its functions, and no public way to have another one.
        patch.setattr(forkserver, "_forkserver", server)
        for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
            patch.setattr(forkserver, name, getattr(server, name))
        yield


@contextmanager
def _server_environment() -> Iterator[None]:
    """Environment of the fork server: it finds `tests`, and numeric libraries start no threads in it."""
    search_path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    before = dict(os.environ)
    os.environ.update(
        SINGLE_THREADED,
        PYTHONPATH=search_path,
        # Else the server would import from the current folder before site-packages.
        PYTHONSAFEPATH="1",
        # Else asking for a GPU while importing would forbid CUDA in all processes forked from there.
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
        # What Megatron compiles on a GPU, a rank compiles itself: torch's pool of processes would outlive it.
        TORCHINDUCTOR_COMPILE_THREADS="1",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(call: Callable[[], Any], world_size: int, timeout: float, grace: float) -> list[RankExit]:
    payload = pickle.dumps(call)
    # Several threads may each run their ranks; starting the server changes the environment for a moment.
    with _starting:
        warm_up()
        environment = {**SINGLE_THREADED, **os.environ}
    # As under torchrun the ranks find a store that listens already: one that had to wait for rank 0 would sleep first.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        jobs = [
            RankJob(
                rank=rank,
                world_size=world_size,
                master_port=store.port,
                directory=Path(directory),
                payload=payload,
                environment=environment,
            )
            for rank in range(world_size)
        ]
        processes: list[ForkServerProcess] = []
        channels: list[Connection] = []
        try:
            for job in jobs:
                ours, theirs = CONTEXT.Pipe()
                process = CONTEXT.Process(target=rank_main, args=(job, theirs))
                channels.append(ours)
                process.start()
                processes.append(process)
                theirs.close()
            reports = _collect_reports(processes, channels, timeout, grace)
            if reports is None:
                stacks = _dump_stacks(processes, jobs)
                raise RankFailure(f"timed out after {timeout:g} s; stacks of the ranks:\n{stacks}")
            # Read before the killing: after it, which rank had died by itself cannot be told any more.
            codes = [process.exitcode for process in processes]
            if all(report is not None for report in reports):
                _release(processes, channels)
        finally:
            _kill(processes)
            for channel in channels:
                channel.close()
        return [_rank_exit(job, report, code) for job, report, code in zip(jobs, reports, codes, strict=True)]


def _collect_reports(
    processes: list[ForkServerProcess], channels: list[Connection], timeout: float, grace: float
) -> list[RankReport | None] | None:
    """Wait for every rank's report, or for `grace` seconds after the first failure.

    Returns:
        One report per rank, None for a rank that died or was still busy; None instead of the list on timeout.
    """
    reports: list[RankReport | None] = [None] * len(processes)
    waiting = set(range(len(processes)))
    deadline = time.monotonic() + timeout
    failed = False
    while waiting:
        # The sentinel tells of a death even while a child of the rank holds its end of the channel open.
        watched: dict[Any, int] = {
            source: rank for rank in waiting for source in (channels[rank], processes[rank].sentinel)
        }
        ready = multiprocessing.connection.wait(watched, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return reports if failed else None
        for rank in sorted({watched[source] for source in ready}):
            waiting.discard(rank)
            report = _receive(channels[rank])
            if report is None:
                processes[rank].join(EXIT_SECONDS)  # its exit code tells the signal
            reports[rank] = report
            if (report is None or report.exit_code != 0) and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + grace)
    return reports


def _receive(channel: Connection) -> RankReport | None:
    """Return the report that lies ready, or None for a rank that died without one."""
    try:
        report: RankReport | None = pickle.loads(channel.recv_bytes()) if channel.poll() else None
        return report
    except (EOFError, ConnectionResetError):
        return None


def _release(processes: list[ForkServerProcess], channels: list[Connection]) -> None:
    for channel in channels:
        channel.send_bytes(b"release")
    deadline = time.monotonic() + EXIT_SECONDS
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            raise RankFailure(f"rank {rank} did not end within {EXIT_SECONDS:g} s of finishing its work")
    for rank, process in enumerate(processes):
        assert process.pid is not None
        # Most need less time to end than it takes to look for them in /proc.
        soon = time.monotonic() + QUICK_EXIT_SECONDS
        while group_exists(process.pid) and time.monotonic() < soon:
            time.sleep(0.01)
        while group_exists(process.pid) and (left := group_members(process.pid)):
            if time.monotonic() > deadline:
                raise RankFailure(f"rank {rank} left processes behind: {', '.join(map(str, left))}")
            time.sleep(0.05)


def _kill(processes: list[ForkServerProcess]) -> None:
    """End every rank and what it started; returns when all of them are gone."""
    for process in processes:
        process.kill()  # before it became the leader of its own group, only this reaches it
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()
    # A signal is in flight for a moment, and nobody can join what is a child of a rank's.
    deadline = time.monotonic() + EXIT_SECONDS
    for process in processes:
        assert process.pid is not None
        while group_exists(process.pid) and group_members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)


def _dump_stacks(processes: list[ForkServerProcess], jobs: list[RankJob]) -> str:
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, STACK_DUMP_SIGNAL)
    time.sleep(0.5)
    parts = []
    for job in jobs:
        stacks = _read(job.stacks_path) or "(no stack)"
        parts.append(f"--- rank {job.rank} ---\n{stacks}\n{_tail(_read(job.stderr_path), 1500)}")
    return "\n".join(parts)


def _rank_exit(job: RankJob, report: RankReport | None, process_code: int | None) -> RankExit:
    return RankExit(
        rank=job.rank,
        exit_code=process_code if report is None else report.exit_code,
        value=pickle.loads(report.value) if report is not None and report.value else None,
        traceback="" if report is None else report.traceback,
        stdout=_read(job.stdout_path),
        stderr=_read(job.stderr_path),
        ended_at=math.inf if report is None else report.ended_at,
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _tail(text: str, characters: int = TAIL_CHARACTERS) -> str:
    return text if len(text) <= characters else "[...]" + text[-characters:]


def _most_telling(failed: list[RankExit]) -> RankExit:
    """A rank killed by a signal explains its peers' errors, else the first error explains the later ones."""
    died = [rank_exit for rank_exit in failed if rank_exit.exit_code is not None and rank_exit.exit_code < 0]
    return died[0] if died else min(failed, key=lambda rank_exit: rank_exit.ended_at)


def _describe(rank_exit: RankExit) -> str:
    if rank_exit.exit_code is not None and rank_exit.exit_code < 0:
        how = f"died of {signal.Signals(-rank_exit.exit_code).name}"
    else:
        how = f"ended with exit code {rank_exit.exit_code}"
    stderr = rank_exit.stderr.replace(rank_exit.traceback, "") if rank_exit.traceback else rank_exit.stderr
    return (
        f"rank {rank_exit.rank} {how}\n{rank_exit.traceback}"
        f"--- end of its standard output ---\n{_tail(rank_exit.stdout)}\n"
        f"{_before_death(stderr)}"
        f"--- end of its standard error ---\n{_tail(stderr)}"
    )


def _before_death(stderr: str) -> str:
    """What the process said when it died, and where: the stacks of the other threads fill the end."""
    at = stderr.find(FATAL)
    if at < 0:
        return ""
    around = stderr[max(0, at - TAIL_CHARACTERS // 2) : at + TAIL_CHARACTERS]
    return f"--- its standard error where it died ---\n{around}\n"
