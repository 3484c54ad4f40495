# SPDX-License-Identifier: Apache-2.0
"""One SPES round of separate processes at a sync service: seconds, bytes, and the server's processor time and memory.

    python -m benchmarks.spes_round [--json FILE]

README.md tells what is compared with what.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks import spes_peers
from benchmarks.bare_turns import GRPC, SOCKETS, BareServer, start_bare
from benchmarks.command_line import (
    MOST_PROCESSES,
    EachOnce,
    add_report_option,
    at_least,
    benchmark_parser,
    folder_that_is_there,
    number_above,
    require_memory,
)
from benchmarks.common import Case, print_table, report
from benchmarks.server_process import Server, server_of
from benchmarks.spes_peers import Job, Measured, Shapes
from megatron_ext.cli.ending import ended_by_sigterm
from tests.support.distributed import run_ranks

PEAK_GOAL = 3.0
BYTES_GOALS = {"fp32": None, "bf16": 0.36, "int8": 0.18, "int4": 0.095}
BYTES_NAMES = {"int4": "4bit"}
THROUGHPUT_GOAL = 0.6
MERGE_GOAL = 0.1
MERGE_EXPERTS = 32
MOST_MILLIONS = 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for and report."""
    options = parser().parse_args(arguments)
    for peers in options.peers:
        if options.experts % peers:
            parser().error(f"--peers {peers}: {options.experts} experts cannot be shared out evenly; give --experts")
    _require_sizes(options)
    shapes = spes_peers.model(1e6 * options.millions, options.layers, options.hidden, options.experts)
    size = f"{numel(shapes) / 1e6:.1f} M parameters ({4 * numel(shapes) / 2**20:.0f} MiB in fp32)"
    print(f"{options.experts} experts, {size}, {100 * shared(shapes):.0f} % shared; {options.rounds} rounds\n")
    cases: list[Case] = []
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="spes_round.", dir=options.dir) as name:
        folder = Path(name)
        if "rounds" in options.parts:
            cases += _rounds(folder, shapes, options)
        if "bytes" in options.parts:
            cases += _bytes(folder, options)
        if "link" in options.parts:
            cases += _link(folder, options)
        if "merge" in options.parts:
            cases += _merge(folder, options)
    report(cases, options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's options."""
    found = benchmark_parser("spes_round", __doc__)
    parts = ("rounds", "bytes", "link", "merge")
    found.add_argument(
        "--parts", choices=parts, nargs="+", action=EachOnce, default=parts, help="what to measure (all)"
    )
    found.add_argument(
        "--peers",
        type=at_least(1, MOST_PROCESSES),
        nargs="+",
        action=EachOnce,
        default=[2, 4, 8],
        help="numbers of peers (2 4 8)",
    )
    found.add_argument(
        "--millions",
        type=number_above(0, MOST_MILLIONS),
        default=126.0,
        help="parameters of the rounds' model (126)",
    )
    found.add_argument("--codec", choices=BYTES_GOALS, default="fp32", help="of the rounds (fp32)")
    found.add_argument(
        "--bytes-millions",
        type=number_above(0, MOST_MILLIONS),
        default=24.0,
        help="of the model whose bytes are counted (24)",
    )
    found.add_argument(
        "--link",
        type=number_above(0, 1e6),
        default=20.0,
        help="MB/s of every peer's slow link, up and down, with that model (20)",
    )
    found.add_argument("--layers", type=at_least(1), default=8, help="its layers (8)")
    found.add_argument("--hidden", type=at_least(1), default=512, help="its hidden size (512)")
    found.add_argument("--experts", type=at_least(1), default=16, help="its experts per layer (16)")
    found.add_argument("--rounds", type=at_least(1), default=3, help="measured rounds (3)")
    found.add_argument("--warmup", type=at_least(0), default=3, help="rounds before those, not counted (3)")
    found.add_argument(
        "--merge-width", type=at_least(1), default=512, help="width of the experts that are merged (512)"
    )
    found.add_argument(
        "--dir", type=folder_that_is_there, help="where the server keeps its state meanwhile (the system's)"
    )
    add_report_option(found)
    return found


def _require_sizes(options: argparse.Namespace) -> None:
    """End the program where the models are too large for this machine."""
    for option, millions in (("--millions", options.millions), ("--bytes-millions", options.bytes_millions)):
        # Of a small one the other sizes decide: four matrices of a layer, the narrowest experts, the least vocabulary.
        fixed = options.hidden * (options.layers * (4 * options.hidden + options.experts * 4) + 32)
        values = max(1e6 * millions, fixed)
        # Peers' own, what the server keeps of each until the mean is made, and the mean.
        named = f"{option}, --layers, --hidden, --experts, --peers"
        require_memory(parser(), named, 4 * values * (max(options.peers) + 1))
    merged = 4 * (MERGE_EXPERTS + 1) * options.merge_width * options.hidden
    require_memory(parser(), "--merge-width, --hidden", merged)


def numel(shapes: Shapes) -> int:
    """Return the number of elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def shared(shapes: Shapes) -> float:
    """Return which part of a model all peers train."""
    return numel({name: shape for name, shape in shapes.items() if ".experts." not in name}) / numel(shapes)


def _rounds(folder: Path, shapes: Shapes, options: argparse.Namespace) -> list[Case]:
    """Return the cases of rounds, for every number of peers."""
    cases, rows = [], []
    coded = "" if options.codec == "fp32" else f"_{options.codec}"
    compared_at = 4 if 4 in options.peers else max(options.peers)
    for peers in options.peers:
        own = folder / f"p{peers}"
        own.mkdir()
        with server_of(own, {options.codec: {"peers": peers}}) as server, ExitStack() as stack:
            # Bare streams move what fp32 takes.
            kinds = (GRPC, SOCKETS) if peers == compared_at and not coded else ()
            bare = {kind: stack.enter_context(start_bare(kind)) for kind in kinds}
            by_peer = _run(_job(shapes, server, options.codec, options, bare=bare), peers)
        found = by_peer[0]
        seconds, cpu = statistics.median(found.seconds), statistics.median(found.server_cpu)
        peak = max(found.server_peak) / (4 * numel(shapes))
        moved = [f"{statistics.median(found.bare[kind].seconds):.2f}" if bare else "-" for kind in (GRPC, SOCKETS)]
        rows.append((str(peers), f"{seconds:.2f}", f"{cpu:.2f}", f"{peak:.2f}", *moved))
        cases.append(_case(f"peak_over_model_p{peers}{coded}", peak, PEAK_GOAL))
        if bare:
            cases += _against_bare(by_peer)
        cases.append(_case(f"round_seconds_p{peers}{coded}", seconds, None, unit="seconds"))
    print_table(("peers", "round s", "server's CPU s", "server's peak / model", "bare gRPC s", "bare sockets s"), rows)
    print()
    return cases


def _against_bare(by_peer: Sequence[Measured]) -> list[Case]:
    """Return the cases of a round against bare streams of its bytes, and what values beside gRPC could bring at most.

    A round without gRPC takes the processors at least what is left of it without the server's event loop and without
    what gRPC alone takes at the peers, plus what plain sockets take; however well the processors are shared out, that
    many seconds divided by their number.
    """
    first = by_peer[0]
    grpc, sockets = first.bare[GRPC], first.bare[SOCKETS]
    peers_cpu = _sums([peer.cpu for peer in by_peer])
    peers_grpc, peers_sockets = (_sums([peer.bare[kind].cpu for peer in by_peer]) for kind in (GRPC, SOCKETS))
    cpu, saved = _sums([first.server_cpu, peers_cpu]), _sums([first.server_thread_cpu, peers_grpc])
    taken = _sums([sockets.server_cpu, peers_sockets])
    cores = len(os.sched_getaffinity(0))
    least = [(total - less + more) / cores for total, less, more in zip(cpu, saved, taken, strict=True)]
    print(
        f"with {len(by_peer)} peers a round takes {statistics.median(cpu):.2f} processor seconds, {cores} cores; "
        f"{statistics.median(saved):.2f} of them are the server's event loop and gRPC at the peers, "
        f"plain sockets take {statistics.median(taken):.2f}"
    )
    fraction, possible = _median_ratio(grpc.seconds, first.seconds), _median_ratio(grpc.seconds, least)
    return [
        _case("grpc_throughput_fraction", fraction, THROUGHPUT_GOAL, direction="higher"),
        _case("sockets_over_grpc", _median_ratio(sockets.seconds, grpc.seconds), None),
        _case("fraction_possible_beside_grpc", possible, None, direction="higher"),
    ]


def _sums(series: Sequence[Sequence[float]]) -> list[float]:
    """Return the sums of several series, place by place."""
    return [sum(values) for values in zip(*series, strict=True)]


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _bytes(folder: Path, options: argparse.Namespace) -> list[Case]:
    """Return the cases of a peer's bytes, up and down, against the whole model in fp32 both ways."""
    shapes = spes_peers.model(1e6 * options.bytes_millions, options.layers, options.hidden, options.experts)
    peers = 4 if 4 in options.peers else max(options.peers)
    cases = []
    own = folder / "bytes"
    own.mkdir()
    with server_of(own, {codec: {"peers": peers} for codec in BYTES_GOALS}) as server:
        for codec, goal in BYTES_GOALS.items():
            found = _run(_job(shapes, server, codec, options, counts_bytes=True), peers)[0]
            fraction = statistics.median(found.wire_bytes) / (2 * 4 * numel(shapes))
            cases.append(_case(f"bytes_{BYTES_NAMES.get(codec, codec)}", fraction, goal))
    return cases


def _link(folder: Path, options: argparse.Namespace) -> list[Case]:
    """Return the case of rounds over slow links, against the time that the bytes of a peer take one after the other."""
    shapes = spes_peers.model(1e6 * options.bytes_millions, options.layers, options.hidden, options.experts)
    peers = 4 if 4 in options.peers else max(options.peers)
    rate = 1e6 * options.link
    own = folder / "link"
    own.mkdir()
    with server_of(own, {"fp32": {"peers": peers}}) as server:
        found = _run(replace(_job(shapes, server, "fp32", options), link=rate), peers)[0]
    ratios = [seconds * rate / moved for seconds, moved in zip(found.seconds, found.wire_bytes, strict=True)]
    return [_case("slow_link_over_its_bytes", statistics.median(ratios), None)]


def _merge(folder: Path, options: argparse.Namespace) -> list[Case]:
    """Return the case of the memory that merging a layer takes, against all differences of its experts at once."""
    (grown,) = run_ranks(
        spes_peers.merge_bytes, 1, folder, MERGE_EXPERTS, options.merge_width, options.hidden, timeout=300
    )
    broadcast = 4 * MERGE_EXPERTS**2 * options.merge_width * options.hidden
    print(
        f"merging {MERGE_EXPERTS} experts takes {grown / 2**20:.1f} MiB, all pairs at once {broadcast / 2**20:.0f} MiB"
    )
    return [_case("merge_memory_fraction", grown / broadcast, MERGE_GOAL)]


def _job(
    shapes: Shapes,
    server: Server,
    codec: str,
    options: argparse.Namespace,
    *,
    bare: Mapping[str, BareServer] | None = None,
    counts_bytes: bool = False,
) -> Job:
    return Job(
        shapes=shapes,
        experts=options.experts,
        address=server.address,
        pid=server.pid,
        codec=codec,
        rounds=options.rounds,
        warmup=options.warmup,
        bare=bare or {},
        counts_bytes=counts_bytes,
    )


def _run(job: Job, peers: int) -> list[Measured]:
    """Return what each peer measured."""
    return run_ranks(spes_peers.peer_rounds, peers, job, timeout=900)


def _case(name: str, value: float, goal: float | None, *, unit: str = "ratio", direction: str = "lower") -> Case:
    return Case(case=name, value=value, unit=unit, goal=goal, direction="higher" if direction == "higher" else "lower")


if __name__ == "__main__":
    sys.exit(main())
