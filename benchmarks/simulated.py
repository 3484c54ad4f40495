# SPDX-License-Identifier: Apache-2.0
"""What `megatron-ext simulate` says against what happens: workers in network namespaces of this machine, whose links
carry 100 Mbit/s or 1 Gbit/s, train with several settings, and each is simulated with the figures of that very run.

    python -m benchmarks.simulated [--png FILE] [--json FILE]

Needs root and iproute2. Steps are pauses, so that workers need the processor for messages and rounds alone. The
simulator is given what the run itself shows of its parts: bytes per second of a bare exchange among the workers, in the
pieces of a round or around a ring, or of a stream for peers, a message's time, the mean and the spread of steps, a
worker's own work in a round, the server's seconds for a round. What is compared is what it makes of them: the part of
the time in which workers train.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import (
    MOST_PROCESSES,
    EachOnce,
    add_report_option,
    at_least,
    benchmark_parser,
    number_above,
    picture,
    require_memory,
)
from benchmarks.common import Case, print_table, report
from benchmarks.emulated_network import EmulatedNetwork, NetworkUnavailable, emulated_network
from benchmarks.server_process import server_of
from megatron_ext.cli.ending import ended_by_sigterm
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.codecs.all_codecs import build_codec
from megatron_ext.simulate.fleet import SimulatedFleet
from megatron_ext.simulate.job_run import SimulatedRun
from megatron_ext.simulate.job_setup import JobSetup
from megatron_ext.simulate.model_units import equal_layers
from megatron_ext.simulate.service_setup import ServiceSetup
from megatron_ext.simulate.simulated_peers import SimulatedPeers, SimulatedServer
from megatron_ext.simulate.training_work import SimulatedTraining
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig
from megatron_ext.sync_service.rounds.journal import read_whole_journal

REPOSITORY = Path(__file__).resolve().parents[1]
GOAL = 0.15
"""Part of the measured utilisation by which the simulated one may differ."""

LAYERS = 8
VALUES = {100: 1_000_000, 1000: 4_000_000}
"""Of the model, by Mbit/s."""

LEAST_VALUES = 1000
"""Of a model: below, fragments of equal layers have hardly any."""

_PROBE_MESSAGES = 100


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to train."""

    name: str
    """For people."""

    kind: str
    """Of the worker's orders."""

    interval: int = 1
    """H."""

    codec: str | None = None
    """Of messages; None for fp32."""

    fragments: int = 1
    """Of the model."""

    delay: int = 0
    """tau."""

    intervals: int = 5
    """That are measured."""

    def sent(self, values: int) -> float:
        """Return the bytes of one way of its rounds, all parts together, for a model of a number of values."""
        if self.kind == "synchronous":
            return 2 * values
        return build_codec(self.codec or "fp32").nbytes(values // self.fragments)


SETTINGS = (
    Setting(name="synchronous", kind="synchronous", intervals=30),
    Setting(name="DiLoCo, H 5", kind="local_sgd", interval=5, intervals=10),
    Setting(name="DiLoCo, H 20", kind="local_sgd", interval=20),
    Setting(name="DiLoCo, H 20, int8", kind="local_sgd", interval=20, codec="int8"),
    Setting(name="streaming, H 20, tau 2", kind="local_sgd", interval=20, fragments=4, delay=2),
    Setting(name="streaming, H 20, tau 2, int4", kind="local_sgd", interval=20, fragments=4, delay=2, codec="int4"),
    Setting(name="service, H 20", kind="service", interval=20, codec="fp32"),
    Setting(name="service, H 20, int8", kind="service", interval=20, codec="int8"),
)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a plain stream shows of it."""

    bytes_per_second: float
    """Of one stream."""

    exchange: float
    """Bytes per second of a worker when all send what a way of a round does, to all and in as many pieces; or what a
    synchronous step does, to the next one."""

    latency: float
    """Seconds of a message."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A setting on a link, once."""

    measured: float
    """Utilisation, in the mean over the workers."""

    simulated: float
    """The same, simulated."""


def values_at(mbits: int) -> int:
    """Return the size of the model on links of a rate."""
    return VALUES.get(mbits, 10_000 * mbits)


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


def simulated(setting: Setting, link: Link, told: list[dict[str, Any]], values: int, reduction: float | None) -> float:
    """Return the simulated utilisation of the intervals that were measured.

    Args:
        setting: what was measured.
        link: between the workers.
        told: by every worker.
        values: of the model.
        reduction: MB/s of the server; None without one.
    """
    steps = [step for worker in told for step in worker["steps"]]
    mean = statistics.fmean(steps)
    # Peers share the server's link, workers have links with each other.
    bandwidth = link.exchange if reduction is None else link.bytes_per_second
    parts = {
        "bandwidth": 8 * bandwidth / 1e9,
        "latency": 1e3 * link.latency,
        "jitter": statistics.pstdev(steps) / mean,
    }

    def run(count: int) -> SimulatedRun:
        training = SimulatedTraining(
            steps=count * setting.interval, step_seconds=mean, round_work=told[0].get("work", 0.0)
        )
        units = equal_layers(values, LAYERS)
        if reduction is not None:
            service = ServiceSetup(
                peers=SimulatedPeers(peers=len(told), **parts),
                server=SimulatedServer(server_bandwidth=parts["bandwidth"], reduction=reduction),
                training=training,
                units=units,
                service=SyncServiceConfig(
                    sync_service="localhost:50051",
                    sync_service_run="simulated",
                    sync_service_peer="peer",
                    sync_service_peers=len(told),
                    sync_service_interval=setting.interval,
                    sync_service_codec=setting.codec or "fp32",
                ),
            )
            service.check()
            return service.run()
        job = JobSetup(
            fleet=SimulatedFleet(workers=len(told), **parts),
            training=training,
            units=units,
            local_sgd=LocalSGDConfig(
                use_local_sgd=True,
                local_sgd_workers=len(told),
                local_sgd_sync_interval=setting.interval,
                codec=setting.codec,
            ),
            streaming=StreamingConfig(
                fragments=setting.fragments, sync_delay=setting.delay, update_alpha=0.5 if setting.delay else 0.0
            ),
        )
        job.check()
        return job.baseline() if setting.kind == "synchronous" else job.run()

    # What was measured begins after the first interval.
    before, after = run(1), run(1 + setting.intervals)
    return (after.time["training"] - before.time["training"]) / (after.seconds - before.seconds)


def reduction_of(journal: Path, values: int, peers: int) -> float:
    """Return MB/s of fp32 values that a server has reduced in the measured rounds of a run."""
    rounds = [event for event in read_whole_journal(journal).events if event["event"] == "committed"]
    seconds = statistics.fmean(event["seconds"] for event in rounds[2:])
    return 4 * values * peers / 1e6 / max(seconds, 1e-3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, simulate and report."""
    options = parser().parse_args(arguments)
    for mbits in options.mbits:
        if options.shrink > values_at(mbits) // LEAST_VALUES:
            most = values_at(mbits) // LEAST_VALUES
            parser().error(f"--shrink {options.shrink} leaves too small a model at {mbits} Mbit/s; give {most} or less")
        # A worker's weights, gradients, anchor, momentum, and messages in flight.
        require_memory(parser(), "--mbits, --workers", 6 * 4 * values_at(mbits) // options.shrink * options.workers)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, options.nice)  # of what is started here, too
        with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="simulated.") as name:
            found, links = _all(options, Path(name))
    except (NetworkUnavailable, PermissionError) as error:
        print(f"benchmarks.simulated: error: {error}", file=sys.stderr)
        return 2
    rows, cases = [], []
    for (mbits, setting), runs in found.items():
        measured, simulated_ = (
            statistics.median(getattr(run, kind) for run in runs) for kind in ("measured", "simulated")
        )
        apart = statistics.median(run.simulated / run.measured - 1 for run in runs)
        spread = f"{min(run.measured for run in runs):.3f} - {max(run.measured for run in runs):.3f}"
        rows.append([setting, f"{mbits}", f"{measured:.3f}", spread, f"{simulated_:.3f}", f"{100 * apart:+.1f}"])
        key = f"{setting}_{mbits}mbit".replace(",", "").replace(" ", "_").lower()
        cases.append(Case(case=key, value=abs(apart), unit="of the measured", goal=GOAL, direction="lower"))
    for mbits, seen in links.items():
        stream, exchange = (
            [8 * getattr(link, kind) / 1e6 for link in seen] for kind in ("bytes_per_second", "exchange")
        )
        print(
            f"links of {mbits} Mbit/s carry {min(stream):.0f} to {max(stream):.0f} as one stream, and "
            f"{min(exchange):.0f} to {max(exchange):.0f} from each worker when all send"
        )
    print(f"{options.workers} workers, {options.repeats} repeats; a step is a pause of {options.step_ms:g} ms\n")
    print_table(["setting", "Mbit/s", "measured", "of repeats", "simulated", "apart, %"], rows)
    if options.png is not None:
        draw(rows, options.png)
    report(cases, options.json)
    return 0


def _all(
    options: argparse.Namespace, folder: Path
) -> tuple[dict[tuple[int, str], list[Found]], dict[int, list[Link]]]:
    found: dict[tuple[int, str], list[Found]] = {}
    links: dict[int, list[Link]] = {}
    chosen = [setting for setting in SETTINGS if options.settings is None or setting.name in options.settings]
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
                        run=name,
                    )
                    is_service = setting.kind == "service"
                    journal = runs / name / "journal.jsonl"
                    reduction = reduction_of(journal, values, options.workers) if is_service else None
                    measured = statistics.fmean(sum(worker["steps"]) / worker["seconds"] for worker in told)
                    one = Found(measured=measured, simulated=simulated(setting, link, told, values, reduction))
                    found.setdefault((mbits, setting.name), []).append(one)
                    print(
                        f"{mbits} Mbit/s, {setting.name}: measured {one.measured:.3f}, simulated {one.simulated:.3f}",
                        file=sys.stderr,
                        flush=True,
                    )
    return found, links


def draw(rows: Sequence[Sequence[str]], file: Path) -> None:
    """Draw measured and simulated utilisation side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.35 * len(rows) + 1.5), layout="constrained")
    places = range(len(rows))
    axes.barh([place - 0.2 for place in places], [float(row[2]) for row in rows], 0.4, label="measured")
    axes.barh([place + 0.2 for place in places], [float(row[4]) for row in rows], 0.4, label="simulated")
    axes.set_yticks(list(places), [f"{row[0]}, {row[1]} Mbit/s" for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="part of the time in which workers train", xlim=(0, 1))
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = benchmark_parser("simulated", __doc__)
    result.add_argument(
        "--workers", type=at_least(2, MOST_PROCESSES), default=3, help="and peers, each on a host of its own (3)"
    )
    result.add_argument(
        "--mbits",
        type=at_least(1, 100_000),
        nargs="+",
        action=EachOnce,
        default=list(VALUES),
        help="of every link (100 1000)",
    )
    result.add_argument("--repeats", type=at_least(1), default=2, help="of everything (2)")
    result.add_argument("--step-ms", type=number_above(0, 1e6), default=50.0, help="of a step (50)")
    names = [setting.name for setting in SETTINGS]
    result.add_argument("--settings", nargs="+", action=EachOnce, choices=names, help="which (all)")
    result.add_argument(
        "--nice", type=at_least(-20, 19), default=-15, help="of all processes, on a machine that others use (-15)"
    )
    result.add_argument("--shrink", type=at_least(1), default=1, help="divide the model's size by this (1)")
    result.add_argument("--png", type=picture, metavar="FILE", help="draw the table")
    add_report_option(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
