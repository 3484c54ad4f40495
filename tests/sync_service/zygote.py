# SPDX-License-Identifier: Apache-2.0
"""A process that has imported torch and gRPC once, and forks servers and peers on request.

It reads one JSON object per line: `argv` for the `megatron-ext` command, `peer` for `toy_peer.py`, or `call` for a
function (`MODULE:NAME`) and its `arguments`; `log` for the file that takes the output, `file_size` for a limit on the
size of files, `descriptors` for the limits, soft and hard, on their number, `packages` for a folder in which Python
finds packages, and `strain` for the file of a `Strain`. It answers with the process's id, and writes the exit status of
a process that has ended to `log` + ".exit".
"""

import gc
import itertools
import json
import os
import pkgutil
import resource
import select
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import megatron_ext.sync_service.peer.client
import megatron_ext.sync_service.server.process  # noqa: F401  # imported once, so that no child has to
from megatron_ext.cli.main import main
from tests.sync_service import strain
from tests.sync_service.toy_peer import run_peer

POLL_SECONDS = 0.02


def _reap(logs: dict[int, str]) -> None:
    """Write down how children have ended."""
    while logs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        path = Path(logs.pop(pid) + ".exit")
        path.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
        path.with_suffix(".new").rename(path)


def _lines(logs: dict[int, str]) -> Iterator[str]:
    """Yield the lines of standard input, and look after the children meanwhile."""
    rest = b""
    while True:
        _reap(logs)
        if not select.select([0], [], [], POLL_SECONDS if logs else None)[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in lines)


def _let_the_clock_jump() -> None:
    """Let the clock of the calendar go a day forth or two days back whenever somebody looks at it."""
    jumps, real = itertools.cycle((0.0, 86400.0, -86400.0)), time.time
    time.time = lambda: real() + next(jumps)


def _child(job: dict[str, Any]) -> int:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job.get("file_size"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], resource.RLIM_INFINITY))
    if job.get("descriptors"):
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(job["descriptors"]))
    if job.get("packages"):
        sys.path.insert(0, job["packages"])
    if job.get("clock_jumps") or job.get("peer", {}).pop("clock_jumps", False):
        _let_the_clock_jump()
    if job.get("strain"):
        strain.install(job["strain"])
    if "call" in job:
        return pkgutil.resolve_name(job["call"])(job["arguments"])
    return main(job["argv"]) if "argv" in job else run_peer(job["peer"])


def _serve() -> None:
    torch.set_num_threads(1)
    # Children need not look for garbage among what they have in common: looking alone would copy all of its memory.
    gc.collect()
    gc.freeze()
    logs: dict[int, str] = {}
    for line in _lines(logs):
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _child(job)
            except BaseException:  # a child must never return into its parent's loop
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        logs[pid] = job["log"]
        print(pid, flush=True)


if __name__ == "__main__":
    _serve()
