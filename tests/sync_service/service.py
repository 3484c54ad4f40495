# SPDX-License-Identifier: Apache-2.0
"""Real servers and real peers for tests: processes that are forked from one that has imported everything."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, SyncClient, Values
from megatron_ext.sync_service.peer.parts import Part
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.protocol import pb2
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until

REPOSITORY = Path(__file__).resolve().parents[2]


class Zygote:
    """Forks processes that start in milliseconds."""

    def __init__(self) -> None:
        search_path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path, "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sync_service.zygote"],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(self, job: dict[str, Any]) -> int:
        """Return the id of a process that does a job."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)


class Process:
    """A process that the zygote has forked."""

    def __init__(self, zygote: Zygote, log: Path, job: dict[str, Any]) -> None:
        self.log = log
        log.with_name(log.name + ".exit").unlink(missing_ok=True)
        self.pid = zygote.fork({**job, "log": str(log)})

    @property
    def output(self) -> str:
        """What it has said so far."""
        return self.log.read_text() if self.log.exists() else ""

    @property
    def descriptors(self) -> int:
        """How many it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def exit_code(self) -> int | None:
        """How it has ended, minus the signal if by one; None while it runs."""
        path = self.log.with_name(self.log.name + ".exit")
        return int(path.read_text()) if path.exists() else None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it has ended."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return its exit code."""
        until(lambda: self.exit_code is not None, f"the end of a process that says: {self.output}", seconds)
        assert self.exit_code is not None
        return self.exit_code

    def limit_files(self, size: int) -> None:
        """Let its files grow to no more than this many bytes; -1 for no limit."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@dataclass
class Service:
    """One server's folder, the server that uses it, and peers."""

    zygote: Zygote
    folder: Path
    runs: dict[str, dict[str, Any]]
    processes: list[Process] = field(default_factory=list)
    # A server that was started again would often find a port that the kernel chose taken by some connection meanwhile.
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    extra: dict[str, Any] = field(default_factory=dict)
    packages: str = ""
    """Folder with packages of others that the server has."""
    server: Process | None = None

    def start(
        self,
        *failpoints: str,
        file_size: int = 0,
        clock_jumps: bool = False,
        descriptors: tuple[int, int] | None = None,
    ) -> Process:
        """Start the server, at the same port every time."""
        config = self.folder / "server.yaml"
        config.write_text(json.dumps({"dir": str(self.state), "bind": self.address, "runs": self.runs, **self.extra}))
        argv = ["server", "start", "--config", str(config)]
        for name in failpoints:
            argv += ["--failpoint", name]
        log = self.folder / f"server.{len(self.processes)}.log"
        also = {"file_size": file_size, "descriptors": descriptors, "packages": self.packages}
        self.server = Process(self.zygote, log, {"argv": argv, "clock_jumps": clock_jumps, **also})
        self.processes.append(self.server)
        until(lambda: "listening at" in self.output or self.server.exit_code is not None, "the server's start")
        return self.server

    @property
    def output(self) -> str:
        """What the server has said."""
        assert self.server is not None
        return self.server.output

    @property
    def state(self) -> Path:
        """The server's folder."""
        return self.folder / "state"

    def peer(self, name: str, rounds: int, **options: Any) -> Process:
        """Start a peer."""
        job = {
            "server": self.address,
            "run": next(iter(self.runs)),
            "name": name,
            "rounds": rounds,
            "report": str(self.folder / f"{name}.jsonl"),
            **options,
        }
        process = Process(self.zygote, self.folder / f"{name}.{len(self.processes)}.log", {"peer": job})
        self.processes.append(process)
        return process

    def seen(self, name: str) -> dict[int, dict[str, Any]]:
        """Return what a peer has written down, by round."""
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {entry["round"]: entry for entry in map(json.loads, lines)}

    def journal(self, run: str | None = None) -> list[dict[str, Any]]:
        """Return what the journal of a run says."""
        path = self.state / "runs" / (run or next(iter(self.runs))) / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def events(self, kind: str, run: str | None = None) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [event for event in self.journal(run) if event["event"] == kind]

    def client(
        self, name: str, values: Catalog | Values, *, parts: Sequence[Part] | None = None, **options: Any
    ) -> SyncClient:
        """Return a client in this process."""
        where = {"server": self.address, "patience_seconds": 20, **options.pop("connection", {})}
        connection = ConnectionConfig(**where)
        options = {
            "run": next(iter(self.runs)),
            "frame_bytes": 4096,
            "call_bytes": 16384,
            "round_seconds": 60,
            "heartbeat_seconds": 0,  # tests put another client in the place of one that they do not close
            **options,
        }
        return SyncClient(ClientConfig(connection=connection, peer=name, **options), values, parts=parts)

    def stop(self) -> None:
        """End everything."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def refusal(address: str, patience: float = PATIENCE, **options: Any) -> str:
    """Return what a caller is told that the server does not answer."""
    config = ConnectionConfig(server=address, patience_seconds=patience, call_seconds=2, **options)
    connection = Connection(config)
    with pytest.raises(UserError) as caught:
        connection.call("Status", pb2.StatusRequest())
    connection.close()
    return str(caught.value)


def kill_process(pid: int) -> None:
    """Kill a process that the zygote has forked, and wait for its end: a busy machine lets it answer for a while."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of process {pid}")
