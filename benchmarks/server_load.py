# SPDX-License-Identifier: Apache-2.0
"""A sync service under 8 to 1,000 synthetic peers: rounds per minute, and its memory, threads and processor seconds.

    python -m benchmarks.server_load [--peers 8 64 256 1000] [--servers 1 2] [--json FILE]

The peers train nothing: they upload small values, wait for the mean and take it over. What grows with their number is
what a round costs per peer.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import (
    MOST_PROCESSES,
    EachOnce,
    add_report_option,
    at_least,
    benchmark_parser,
    folder_that_is_there,
    require_memory,
)
from benchmarks.common import Case, print_table, report
from benchmarks.process_use import process_peak, processor_seconds, thread_count
from benchmarks.server_process import Server, server_of
from benchmarks.synthetic_peers import SyntheticPeers
from megatron_ext.cli.ending import ended_by_sigterm
from megatron_ext.sync_service.rounds.members import MOST_PEERS
from tests.support.ports import free_ports


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One number of peers at one number of servers. Of several servers, the one that has most."""

    seconds: float
    """Of a round."""

    processor: float
    """Seconds of a server's processors in a round."""

    peers_processor: float
    """Seconds of processors that all peers take in a round."""

    peak: int
    """Largest resident memory of a server, bytes."""

    threads: int
    """Of a server."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for and report."""
    options = parser().parse_args(arguments)
    _require_sizes(options)
    print(f"{options.values} values in {options.tensors} tensors, {options.rounds} rounds\n")
    found: dict[tuple[int, int], Measured] = {}
    for servers in options.servers:
        for peers in options.peers:
            with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="server_load.", dir=options.dir) as name:
                found[servers, peers] = _measure(Path(name), servers, peers, options)
    header = ("servers, peers", "s/round", "rounds/min", "server's cpu s", "peers' cpu s", "MiB", "threads", "growth")
    print_table(header, [_row(found, servers, peers) for servers, peers in found])
    cases = []
    for (servers, peers), measured in found.items():
        name = f"s{servers}_p{peers}"
        cases.append(_case(f"load_round_seconds_{name}", measured.seconds, "s"))
        cases.append(_case(f"load_processor_seconds_{name}", measured.processor, "s"))
        cases.append(_case(f"load_peak_mib_{name}", measured.peak / 2**20, "MiB"))
        cases.append(_case(f"load_threads_{name}", measured.threads, "threads"))
    report(cases, options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's options."""
    found = benchmark_parser("server_load", __doc__)
    found.add_argument(
        "--peers",
        type=at_least(1, MOST_PEERS),
        nargs="+",
        action=EachOnce,
        default=[8, 64, 256, 1000],
        help="(8 64 256 1000)",
    )
    found.add_argument(
        "--servers",
        type=at_least(1, MOST_PROCESSES),
        nargs="+",
        action=EachOnce,
        default=[1],
        help="that share the values (1)",
    )
    found.add_argument("--values", type=at_least(1, 10**12), default=20_000, help="of a peer, in fp32 (20000)")
    found.add_argument("--tensors", type=at_least(1), default=8, help="among which they are divided (8)")
    found.add_argument("--rounds", type=at_least(1), default=5, help="measured rounds (5)")
    found.add_argument("--warmup", type=at_least(0), default=2, help="rounds before those, not counted (2)")
    found.add_argument(
        "--processes", type=at_least(1, MOST_PROCESSES), default=2, help="in which the peers are threads (2)"
    )
    found.add_argument("--dir", type=folder_that_is_there, help="for the servers' files (a temporary folder)")
    add_report_option(found)
    return found


def _require_sizes(options: argparse.Namespace) -> None:
    """End the program where the options do not go together, or are too large for this machine."""
    if options.tensors > options.values:
        parser().error(f"--tensors is {options.tensors}, of {options.values} values; give {options.values} or less")
    if max(options.servers) > options.tensors:
        parser().error(f"--servers is {max(options.servers)}; give as many tensors for them to share (--tensors)")
    # A peer's own, what it uploads and what it takes over.
    require_memory(parser(), "--values, --peers", 3 * 4 * options.values * max(options.peers))


def _measure(folder: Path, servers: int, peers: int, options: argparse.Namespace) -> Measured:
    """Make rounds of that many peers at that many servers."""
    run = {"peers": peers, "outer_optimizer": "sgd"}
    addresses = [f"127.0.0.1:{port}" for port in free_ports(servers)] if servers > 1 else []
    with ExitStack() as stack:
        started: list[Server] = []
        for shard in range(servers):
            place = folder / f"server-{shard}"
            place.mkdir()
            settings = {"bind": addresses[shard], "shards": addresses, "shard": shard} if addresses else {}
            started.append(stack.enter_context(server_of(place, {"load": run}, settings=settings)))
        peers_of = stack.enter_context(SyntheticPeers(started[0].address, peers, options))
        peers_of.rounds(options.warmup)
        before = [processor_seconds(server.pid) for server in started]
        peers_before, began = peers_of.processor_seconds(), time.perf_counter()
        peers_of.rounds(options.rounds)
        seconds = (time.perf_counter() - began) / options.rounds
        after = [processor_seconds(server.pid) for server in started]
        return Measured(
            seconds=seconds,
            processor=max(late - early for late, early in zip(after, before, strict=True)) / options.rounds,
            peers_processor=(peers_of.processor_seconds() - peers_before) / options.rounds,
            peak=max(process_peak(server.pid) for server in started),
            threads=max(thread_count(server.pid) for server in started),
        )


def _row(found: dict[tuple[int, int], Measured], servers: int, peers: int) -> tuple[str, ...]:
    """Return the row of a table; its growth is the exponent of the seconds since the number of peers before."""
    measured = found[servers, peers]
    fewer = [number for served, number in found if served == servers and number < peers]
    growth = "-"
    if fewer:
        before = found[servers, max(fewer)]
        growth = f"{math.log(measured.seconds / before.seconds) / math.log(peers / max(fewer)):.2f}"
    return (
        f"{servers}, {peers}",
        f"{measured.seconds:.2f}",
        f"{60 / measured.seconds:.1f}",
        f"{measured.processor:.2f}",
        f"{measured.peers_processor:.2f}",
        f"{measured.peak / 2**20:.0f}",
        str(measured.threads),
        growth,
    )


def _case(name: str, value: float, unit: str) -> Case:
    return Case(case=name, value=value, unit=unit, goal=None, direction="lower")


if __name__ == "__main__":
    sys.exit(main())
