# SPDX-License-Identifier: Apache-2.0
"""Several servers that have parts of the values of runs."""

import json
from collections.abc import Mapping
from typing import Any

from tests.support.ports import free_ports
from tests.support.waiting import until
from tests.sync_service.service import Process, Service


class Cluster:
    """One server, or several that share a run's values; `service` has the first one's folder, and the peers."""

    def __init__(self, service: Service, count: int, **extra: Any) -> None:
        self.service = service
        self.extra = extra
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.servers: dict[int, Process] = {}
        service.address = self.addresses[0]

    def start(self, number: int, *failpoints: str, **changes: Any) -> Process:
        """Start one of the servers, with changes to the file that all have in common."""
        return started(self.launch(number, *failpoints, **changes))

    def launch(self, number: int, *failpoints: str, packages: str = "", **changes: Any) -> Process:
        """Begin to start one, beside the packages in a folder."""
        service = self.service
        shards = {"shards": self.addresses} if len(self.addresses) > 1 else {"bind": self.addresses[0]}
        config = service.folder / f"server.{len(service.processes)}.yaml"
        config.write_text(
            json.dumps({"dir": str(service.state), "runs": service.runs, **self.extra, **shards, **changes})
        )
        argv = ["server", "start", "--config", str(config)]
        if number > 0:
            argv += ["--shard", str(number)]
        for name in failpoints:
            argv += ["--failpoint", name]
        log = service.folder / f"server.{len(service.processes)}.log"
        server = Process(service.zygote, log, {"argv": argv, "packages": packages})
        service.processes.append(server)
        self.servers[number] = server
        return server

    def start_all(self, failpoints: Mapping[int, str] | None = None) -> None:
        """Start all servers, the first one last: it would try the others again only after a while."""
        armed = {number: [name] for number, name in (failpoints or {}).items()}
        for server in [self.launch(number, *armed.get(number, [])) for number in range(1, len(self.addresses))]:
            started(server)
        self.start(0, *armed.get(0, []))

    def digests(self, run: str) -> list[str]:
        """Return the digests of a run's rounds."""
        return [event["digest"] for event in self.service.journal(run) if event["event"] == "committed"]


def started(server: Process) -> Process:
    until(lambda: "listening at" in server.output or server.exit_code is not None, "the server's start")
    return server
