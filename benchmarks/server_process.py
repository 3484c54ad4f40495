# SPDX-License-Identifier: Apache-2.0
"""A sync server as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Server", "server_of"]

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server process."""

    address: str
    """Where it listens."""

    pid: int
    """Its process; that of the command around it where there is one."""

    runs: Path
    """Folder of its runs."""


@contextmanager
def server_of(
    folder: Path,
    runs: Mapping[str, Mapping[str, Any]],
    *,
    settings: Mapping[str, Any] | None = None,
    command: Callable[[list[str]], list[str]] = list,
) -> Iterator[Server]:
    """Run a server until the end of the block.

    Args:
        folder: of its files.
        runs: their settings by name.
        settings: of the server, in place of a free port of this machine.
        command: puts what starts it elsewhere around its own command.

    Raises:
        RuntimeError: it has not started.
    """
    config, log = folder / "server.yaml", folder / "server.log"
    said = {"dir": str(folder / "state"), "bind": "127.0.0.1:0", **(settings or {})}
    config.write_text(json.dumps({**said, "runs": runs}))
    code = "import sys; from megatron_ext.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with log.open("w") as file:
        process = subprocess.Popen(
            command([sys.executable, "-c", code, "server", "start", "--config", str(config)]),
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "listening at " not in line:
            raise RuntimeError(f"the server has not started: {log.read_text()}")
        address = line.split("listening at ")[1].split(",")[0]
        yield Server(address=address, pid=process.pid, runs=folder / "state" / "runs")
    finally:
        process.terminate()
        process.wait()
