# SPDX-License-Identifier: Apache-2.0
"""A run of a real server and plain PyTorch peers, each a process, whom somebody starts again when they have ended."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.chaos import actions
from tests.chaos.credentials import Credentials
from tests.chaos.damage import Damage
from tests.chaos.history import End, History, JournalTail, Struck
from tests.chaos.relay import Relay
from tests.chaos.replay import faultless
from tests.chaos.schedule import SERVER, Fault
from tests.chaos.settings import RUN, Settings, peer_name
from tests.chaos.task import Task
from tests.support.ports import free_port
from tests.sync_service.service import Process, Zygote
from tests.sync_service.strain import Strain

__all__ = ["Synthetic", "run_synthetic"]

_TICK = 0.03
_STALL = 1.0
"""Seconds between two looks at the run from which the machine itself had a pause."""
_AGAIN = 0.3
"""Seconds after which a peer that has ended by itself is started again."""
_MOST_ENDS = 50
"""Processes that end by themselves in a run."""
_PATIENCE = 240.0
"""Seconds for what has to come when all faults are over."""


def run_synthetic(
    settings: Settings, faults: Sequence[Fault], *, seconds: float, folder: Path, zygote: Zygote
) -> History:
    """Make a run, and return its history.

    Args:
        settings: of the run.
        faults: what happens to it, in the order of their time.
        seconds: how long it lasts after all peers have begun, or until the last fault has ended.
        folder: where its files are, an empty one.
        zygote: forks its processes.
    """
    run = Synthetic(settings, folder, zygote)
    try:
        run.make(faults, seconds)
    finally:
        run.close()
    return run.history


class Synthetic:
    """The run, as actions see it."""

    def __init__(self, settings: Settings, folder: Path, zygote: Zygote) -> None:
        self.folder = folder
        self.history = History(settings=settings)
        self.processes: dict[str, Process] = {}
        self.state = folder / "state" / "runs" / RUN
        self.journal = self.state / "journal.jsonl"
        self.tail = JournalTail(self.journal)
        self._settings, self._zygote = settings, zygote
        self._port = free_port()
        self._server_config = folder / "server.json"
        addresses = [f"127.0.0.1:{port}" for port in (self._port, *(free_port() for _ in settings.servers[1:]))]
        where = {"bind": addresses[0]} if settings.shards == 1 else {"shards": addresses}
        self._credentials = Credentials(folder / "credentials") if settings.tls else None
        files = {} if self._credentials is None else self._credentials.of_servers(settings.shards)
        self._server_config.write_text(
            json.dumps({"dir": str(folder / "state"), **where, **files, "runs": {RUN: settings.run_config()}})
        )
        self._names = [peer_name(index) for index in range(settings.peers)]
        self.relays = {name: Relay(self._port, settings.seed, is_encrypted=settings.tls) for name in self._names}
        self.strains = {name: Strain(folder / f"{name}.strain") for name in (*settings.servers, *self._names)}
        self._away: set[str] = set()
        self._starts: dict[str, float] = {}
        self._damages: dict[str, Damage] = {}
        """By server, what is damaged there and not repaired yet."""
        self._looked = time.monotonic()
        self._are_watched = False

    # What actions do.

    def start(self, who: str) -> None:
        """Start a server or a peer."""
        self._away.discard(who)
        if who in self._settings.servers:
            shard = self._settings.servers.index(who)
            argv = ["server", "start", "--config", str(self._server_config)]
            self.processes[who] = self._forked(who, {"argv": argv + (["--shard", str(shard)] if shard else [])})
        else:
            self.processes[who] = self._started(who)

    def kill(self, who: str) -> None:
        """Kill a server or a peer, which stays away until it is started."""
        self._away.add(who)
        self._starts.pop(who, None)
        self.processes[who].kill()
        self.processes[who].wait()

    def killed(self, server: str) -> Path:
        """Kill a server; return where its state is."""
        self.kill(server)
        shard = self._settings.servers.index(server)
        return self.folder / "state" / f"shard-{shard}" / "runs" / RUN if shard else self.state

    def limit_files(self, server: str, size: int) -> None:
        """Let a server's files grow to no more than this many bytes; -1 for no limit."""
        if self.processes[server].exit_code is None:
            self.processes[server].limit_files(size)

    def damage(self, struck: Struck, path: Path | None, dice: random.Random) -> None:
        """Flip a bit of a file of a server, which is away."""
        server = struck.fault.target
        if server in self._damages:
            self._damages.pop(server).give_up()
        self.tail.look()
        if path is None:
            struck.outcome = "harmless: there was no such file"
        else:
            self._damages[server] = Damage(struck, path, self.tail.newest, dice)

    # The run.

    def _started(self, who: str) -> Process:
        """Start a peer."""
        arguments = {
            "settings": self._settings.as_json(),
            "index": self._names.index(who),
            "server": self.relays[who].address,
            "files": {} if self._credentials is None else self._credentials.of_peers,
            "folder": str(self.folder),
        }
        return self._forked(who, {"call": "tests.chaos.peer:run", "arguments": arguments})

    def _forked(self, who: str, job: dict[str, Any]) -> Process:
        count = len(list(self.folder.glob(f"{who}.*.log")))
        log = self.folder / f"{who}.{count:03d}.log"
        return Process(self._zygote, log, {**job, "strain": str(self.strains[who].path)})

    def make(self, faults: Sequence[Fault], seconds: float, *, stop: int | None = None) -> None:
        """Start everything, let the faults happen, and let the peers end when all is well again.

        Args:
            faults: in the order of their time.
            seconds: how long it lasts after all peers have begun, or until the last fault has ended.
            stop: the round after which the peers end by themselves; unless given, one after all that.
        """
        for who in (*self._settings.servers, *self._names):
            self.start(who)
        if not self._until(self._all_have_begun, "all peers' first interval"):
            return
        began = self._looked = time.monotonic()
        self._are_watched = True
        self._strike(faults, began, began + seconds)
        calm = time.monotonic()
        if stop is not None:
            self.history.stop = stop
            self._await_end()
        elif self._until(lambda: self._has_recovered(calm), "a round of all peers after the last fault"):
            self._stop_peers()
        self.history.seconds = time.monotonic() - began
        self._conclude()

    def close(self) -> None:
        """End everything."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        for relay in self.relays.values():
            relay.close()

    def _strike(self, faults: Sequence[Fault], began: float, until: float) -> None:
        """Let faults begin and end at their times."""
        begins = sorted(faults, key=lambda fault: fault.at)
        going: list[Struck] = []
        while begins or going or time.monotonic() < until:
            now = time.monotonic()
            for struck in [found for found in going if now >= found.begun + found.fault.seconds]:
                going.remove(struck)
                actions.end(self, struck)
                struck.ended = time.monotonic()
            # What the one before has begun on the same place may last longer here than it was meant to.
            busy = {struck.fault.target for struck in going}
            while begins and now >= began + begins[0].at and begins[0].target not in busy:
                struck = Struck(fault=begins.pop(0), begun=now)
                self.history.struck.append(struck)
                going.append(struck)
                actions.begin(self, struck)
                struck.begun = time.monotonic()
                busy.add(struck.fault.target)
            if now < time.monotonic() - _TICK:
                self._looked = time.monotonic()  # what actions take is not a pause of the machine
            self._look_after()

    def _look_after(self) -> None:
        """Wait a moment, take in what is new, and start what has ended by itself."""
        time.sleep(_TICK)
        now = time.monotonic()
        if now - self._looked > _STALL and self._are_watched:
            stall = Fault(kind="machine stalled", at=0.0, seconds=now - self._looked, target=SERVER, dice=0)
            self.history.struck.append(Struck(fault=stall, begun=self._looked, ended=now))
        self._looked = now
        self.tail.look()
        for who, process in self.processes.items():
            if who not in self._away and who not in self._starts and process.exit_code not in (None, 0):
                self._ended(who, process)
        for who in [who for who, due in self._starts.items() if now >= due]:
            del self._starts[who]
            self.start(who)
        for server, damage in list(self._damages.items()):
            self._look_after_damage(server, damage)
        self._looked = time.monotonic()

    def _ended(self, who: str, process: Process) -> None:
        """Take note of a process that has ended by itself."""
        said = (process.output.strip().splitlines() or [""])[-1]
        if who not in self._settings.servers:
            gave_up = [line for line in self._written(who) if line["event"] == "gave up"]
            said = gave_up[-1]["message"] if gave_up and process.exit_code == 2 else said
        now = time.monotonic()
        assert process.exit_code is not None
        if who in self._damages and self._damages[who].was_refused(process.output):
            self._damages.pop(who).repair(self._zygote, self.folder)
            self.tail.look_again()
        else:
            self.history.ends.append(End(who=who, at=now, code=process.exit_code, said=said))
        self._starts[who] = now + _AGAIN

    def _look_after_damage(self, server: str, damage: Damage) -> None:
        if server in self._away:
            return
        told = [end.said for end in self.history.ends if end.at > damage.struck.begun]
        if damage.is_noticed(self.processes[server].output, told):
            self.kill(server)
            damage.repair(self._zygote, self.folder)
            self.tail.look_again()
            del self._damages[server]
            self.start(server)
        elif self.tail.newest > damage.newest + 2:
            damage.is_over()
            del self._damages[server]

    def _all_have_begun(self) -> bool:
        return all(any(line["event"] == "resumes" for line in self._written(name)) for name in self._names)

    def _has_recovered(self, since: float) -> bool:
        """Return whether every peer has counted in a round since, and nothing is damaged any more."""
        counted = {
            name
            for event in self.tail.events
            if event["event"] == "committed" and event["seen"] > since
            for name in event["contributors"]
        }
        return not self._damages and counted == set(self._names)

    def _stop_peers(self) -> None:
        settings = self._settings
        self.history.stop = self.tail.newest + 2 * (settings.peers if settings.asynchronous else 1)
        path = self.folder / "stop"
        path.with_suffix(".new").write_text(str(self.history.stop))
        path.with_suffix(".new").replace(path)
        self._await_end()

    def _await_end(self) -> None:
        self._until(lambda: all(self.processes[name].exit_code == 0 for name in self._names), "the end of all peers")

    def _until(self, condition: Callable[[], bool], what: str) -> bool:
        end = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > end or len(self.history.ends) > _MOST_ENDS:
                self.history.stuck = f"{what} has not come in {_PATIENCE:.0f} s, or processes end again and again"
                return False
            self._look_after()
        return True

    def _written(self, name: str) -> list[dict]:
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _conclude(self) -> None:
        history, task = self.history, Task(self._settings.seed, self._settings.owners)
        self.tail.look()
        history.journal = self.tail.events
        history.read_peers(self.folder)
        ends = [(said[-1]["round"], name) for name in self._names if (said := history.said(name, "ends"))]
        if ends:
            newest, name = max(ends)
            history.loss = task.loss(torch.load(self.folder / f"{name}.final"))
            history.faultless_loss = task.loss(faultless(self._settings, task, newest))
