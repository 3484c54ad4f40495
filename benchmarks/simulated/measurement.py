# SPDX-License-Identifier: Apache-2.0
"""Workers and a sync server on hosts of an emulated network, and what they measure of every setting."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.emulated_network import EmulatedNetwork, emulated_network
from benchmarks.server_process import server_of
from benchmarks.simulated.settings import LAYERS, chosen_settings, values_at
from benchmarks.simulated.simulation import Link, reduction_of, simulated
from tests.support.distributed import REPOSITORY

__all__ = ["Found", "Workers", "measure_all", "server_on"]

_PROBE_MESSAGES = 100


@dataclass(frozen=True, kw_only=True)
class Found:
    """A setting on a link, once."""

    measured: float
    """Utilisation, in the mean over the workers."""

    simulated: float
    """The same, simulated."""


class Workers:
    """Processes on their hosts, which do the same together."""

    def __init__(self, network: EmulatedNetwork, count: int, stack: ExitStack, folder: Path) -> None:
        """Start them, and wait until they know each other."""
        addresses = [network.address(host) for host in range(count)]
        variables = {"GLOO_SOCKET_IFNAME": network.device, "OMP_NUM_THREADS": "1"}
        self._processes = []
        for rank in range(count):
            words = [sys.executable, "-m", "benchmarks.emulated_worker", "--rank", str(rank), "--addresses", *addresses]
            log = stack.enter_context((folder / f"worker{rank}.log").open("w"))
            process = subprocess.Popen(
                network.command(rank, words),
                cwd=REPOSITORY,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.callback(_end, process)
            self._processes.append(process)
        self._answers(folder)
        self._folder = folder

    def do(self, **order: Any) -> list[dict[str, Any]]:
        """Let all carry out an order, and return what each says."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        return self._answers(self._folder)

    def _answers(self, folder: Path) -> list[dict[str, Any]]:
        found = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"worker {rank} has ended: {(folder / f'worker{rank}.log').read_text()[-2000:]}")
            found.append(json.loads(line))
        return found


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()


@contextmanager
def server_on(
    network: EmulatedNetwork, host: int, folder: Path, runs: Sequence[str], peers: int
) -> Iterator[tuple[str, Path]]:
    """Run a sync service on a host; yield its address, and the folder of its runs."""
    settings = {"bind": f"{network.address(host)}:50051", "insecure": True}
    run = {"peers": peers, "outer_optimizer": "sgd"}
    with server_of(
        folder, dict.fromkeys(runs, run), settings=settings, command=partial(network.command, host)
    ) as server:
        yield server.address, server.runs


def measure_all(
    options: argparse.Namespace, folder: Path
) -> tuple[dict[tuple[int, str], list[Found]], dict[int, list[Link]]]:
    """Measure and simulate what was asked for; return both by rate and setting, and the links by rate.

    Args:
        options: of the command line.
        folder: for logs, and for the files of a server.

    Raises:
        NetworkUnavailable: there cannot be such a network here.
    """
    found: dict[tuple[int, str], list[Found]] = {}
    links: dict[int, list[Link]] = {}
    chosen = chosen_settings(options.settings)
    names = {
        (mbits, setting.name, repeat): f"run-{mbits}-{place}-{repeat}"
        for mbits in options.mbits
        for place, setting in enumerate(chosen)
        for repeat in range(options.repeats)
    }
    peers = [name for (_, setting, _), name in names.items() if setting.startswith("service")]
    with ExitStack() as stack:
        network = stack.enter_context(emulated_network(options.workers + 1))
        network.limit(max(options.mbits))
        address, runs = "", folder
        if peers:
            address, runs = stack.enter_context(
                server_on(network, options.workers, folder, peers, options.workers)
            )
        workers = Workers(network, options.workers, stack, folder)
        for repeat in range(options.repeats):
            for mbits in options.mbits:
                network.limit(mbits)
                values = values_at(mbits) // options.shrink
                for setting in chosen:
                    # A machine's load changes from one to the next, and with it what a link carries; and a short
                    # message has less of a link than a long one.
                    sent = int(setting.sent(values))
                    seen = workers.do(
                        kind="probe",
                        nbytes=mbits * 30_000,
                        sent=sent,
                        buffers=LAYERS // setting.fragments,
                        is_ring=setting.kind == "synchronous",
                        messages=_PROBE_MESSAGES,
                    )
                    link = Link(**{**seen[0], "exchange": statistics.fmean(one["exchange"] for one in seen)})
                    links.setdefault(mbits, []).append(link)
                    name = names[mbits, setting.name, repeat]
                    told = workers.do(
                        kind=setting.kind,
                        values=values,
                        layers=LAYERS,
                        step_seconds=options.step_ms / 1e3,
                        interval=setting.interval,
                        intervals=setting.intervals,
                        codec=setting.codec,
                        fragments=setting.fragments,
                        delay=setting.delay,
                        log=str(folder / f"{name}.jsonl"),
                        server=address,
                        way_seconds=options.latency_ms / 1e3,
                        run=name,
                    )
                    is_service = setting.kind == "service"
                    journal = runs / name / "journal.jsonl"
                    reduction = reduction_of(journal, values, options.workers) if is_service else None
                    measured = statistics.fmean(sum(worker["steps"]) / worker["seconds"] for worker in told)
                    at = replace(link, latency=link.latency + options.latency_ms / 1e3)
                    one = Found(measured=measured, simulated=simulated(setting, at, told, values, reduction))
                    found.setdefault((mbits, setting.name), []).append(one)
                    print(
                        f"{mbits} Mbit/s, {setting.name}: measured {one.measured:.3f}, simulated {one.simulated:.3f}",
                        file=sys.stderr,
                        flush=True,
                    )
    return found, links
