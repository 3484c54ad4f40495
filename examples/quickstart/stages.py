# SPDX-License-Identifier: Apache-2.0
"""Running the quickstart's stages as processes: output to a log, nothing left behind."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from with_parent import with_parent

PATIENCE_SECONDS = 15
"""How long an interrupted stage may take to end its own processes."""

LOG_TAIL_LINES = 25
LOG_TAIL_WIDTH = 300

# The first words of torchrun after a rank failed. Its report is longer than the tail and says nothing about why.
_TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] ")

_ITERATION = re.compile(r"iteration +(\d+)/ *(\d+) .*elapsed time per iteration \(ms\): ([\d.]+)")
_LOSS = re.compile(r"lm loss: ([\d.E+-]+)")
_ROUND = re.compile(r"outer round: (\d+)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+).*lm loss value: ([\d.E+-]+)")


class StageError(Exception):
    """A stage ended with an error; the message has the end of its log."""


def run_stage(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda _line: None,
) -> None:
    """Run a command with its output in a log.

    Args:
        command: program and arguments.
        log: file that receives standard output and error; replaced.
        environment: environment variables; this process's own when None.
        on_line: called with every line of the output.

    Raises:
        StageError: the command failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w", encoding="utf-8", errors="replace") as file,
        _process(command, environment) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            on_line(line)
        status = process.wait()
    if status != 0:
        tail = "".join(f"\n    {line}" for line in log_tail(log))
        raise StageError(f"this stage failed with exit status {status}; the end of {log}:{tail}")


def log_tail(log: Path) -> list[str]:
    """Return the last lines that the failed processes themselves wrote."""
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    for number, line in enumerate(lines):
        if _TORCHRUN_REPORT.search(line):
            lines = lines[:number]
            break
    return [line[:LOG_TAIL_WIDTH] for line in lines[-LOG_TAIL_LINES:]]


@contextlib.contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str] | None) -> Iterator["subprocess.Popen[str]"]:
    """Start a process in a group of its own and end it, whatever happens."""
    process = subprocess.Popen(
        with_parent(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        # A Ctrl-C reaches this process alone, which then ends the stage in order.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # torchrun passes it on to its ranks, which have sessions of their own, and waits for them.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                # The ranks follow: see end_with_parent in measured_pretrain.py.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert process.stdout is not None
        process.stdout.close()


def progress(line: str) -> str | None:
    """Return what to show of a line of Megatron's log, None for nothing."""
    validation = _VALIDATION.search(line)
    if validation:
        return f"validation loss at iteration {validation[1]}: {float(validation[2]):.3f}"
    iteration, loss = _ITERATION.search(line), _LOSS.search(line)
    if not iteration or not loss:
        return None
    shown = f"iteration {iteration[1]:>4}/{iteration[2]}   training loss {float(loss[1]):.3f}"
    shown += f"   {float(iteration[3]):.0f} ms per iteration"
    outer_round = _ROUND.search(line)
    return shown + (f"   outer rounds so far: {outer_round[1]}" if outer_round else "")
