# SPDX-License-Identifier: Apache-2.0
"""From which size on a part of a switch is worth a message of its own: 4 processes send each other parts of one size,
each as a message from its tensor into the receiver's, or copied into messages of `--chunk-bytes` and out of them again.

    python benchmarks/switch_sizes.py

It is what `DEFAULT_SIZES` of megatron_ext/hot_switch/transfer/messages.py stands on.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import add_report_option, at_least, benchmark_parser, require_memory
from benchmarks.common import Case, print_table, report
from benchmarks.ranks.switching import RANKS, measure_by_turns
from benchmarks.switch import slowest
from megatron_ext.hot_switch.transfer.messages import DEFAULT_SIZES
from tests.support.distributed import run_ranks

SIZES = [1 << power for power in (10, 12, 14, 15, 16, 17, 18, 20)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every size and report the smallest at which an own message is not slower."""
    options = parser().parse_args(arguments)
    # Each way to and from each peer: parts, the gaps between them, and messages.
    require_memory(parser(), "--total-bytes", RANKS * (RANKS - 1) * 2 * 3 * options.total_bytes)
    by_rank = run_ranks(rank_seconds, RANKS, options.total_bytes, options.chunk_bytes, options.pairs, timeout=900)
    rows: list[tuple[str, ...]] = []
    faster: list[int] = []
    for number, size in enumerate(SIZES):
        sides = slowest([measured[number] for measured in by_rank])
        ratio = statistics.median(own / packed for own, packed in zip(sides["own"], sides["packed"], strict=True))
        times = (f"{statistics.median(sides[side]) * 1e3:.2f}" for side in ("own", "packed"))
        rows.append((str(size), str(options.total_bytes // size), *times, f"{ratio:.3f}"))
        faster = [*faster, size] if ratio <= 1 else []
    print_table(("bytes", "parts per peer", "own messages ms", "packed ms", "ratio"), rows)
    crossing = float(min(faster, default=2 * SIZES[-1]))
    report([Case(case="direct_bytes_gloo", value=crossing, unit="bytes", goal=None, direction="lower")], options.json)
    return 0


def rank_seconds(total_bytes: int, chunk_bytes: int, pairs: int) -> list[dict[str, list[float]]]:
    """Run on one rank: return the seconds of both ways for every size."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    measured = []
    for size in SIZES:
        outgoing, incoming = _Parts(rank, size, total_bytes, chunk_bytes), _Parts(rank, size, total_bytes, chunk_bytes)
        sides: dict[str, Callable[[], object]] = {
            "own": functools.partial(_exchange, incoming.parts, outgoing.parts),
            "packed": functools.partial(_exchange_packed, incoming, outgoing),
        }
        measured.append(measure_by_turns(sides, pairs=pairs, warmup=2))
    return measured


class _Parts:
    """What goes to, or comes from, every peer: parts of one size, and chunks with room for them."""

    def __init__(self, rank: int, size: int, total_bytes: int, chunk_bytes: int) -> None:
        import torch

        self.parts: list[tuple[int, torch.Tensor]] = []
        self.chunks: list[tuple[int, torch.Tensor]] = []
        self.places: list[torch.Tensor] = []
        for distance in range(1, RANKS):
            peer = (rank + distance) % RANKS
            # Every other piece of the memory, so that no part is the neighbour of another one.
            parts = torch.ones(2 * total_bytes, dtype=torch.uint8).split(size)[::2]
            chunks = torch.ones(total_bytes, dtype=torch.uint8).split(chunk_bytes)
            self.parts += [(peer, part) for part in parts]
            self.chunks += [(peer, chunk) for chunk in chunks]
            self.places += [place for chunk in chunks for place in chunk.split(size)]


def _exchange(incoming: list[tuple[int, Any]], outgoing: list[tuple[int, Any]]) -> None:
    import torch.distributed as dist

    operations = [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in incoming]
    operations += [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in outgoing]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _exchange_packed(incoming: _Parts, outgoing: _Parts) -> None:
    import torch

    torch._foreach_copy_(outgoing.places, [part for _, part in outgoing.parts])
    _exchange(incoming.chunks, outgoing.chunks)
    torch._foreach_copy_([part for _, part in incoming.parts], incoming.places)


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's options."""
    found = benchmark_parser("switch_sizes", __doc__)
    chunk = DEFAULT_SIZES["gloo"].chunk_bytes
    found.add_argument("--pairs", type=at_least(1), default=15, help="measured pairs (15)")
    found.add_argument("--total-bytes", type=_bytes, default=8 << 20, help="for each peer (8 MiB)")
    packed = f"of packed messages ({chunk >> 20} MiB, as in a switch)"
    found.add_argument("--chunk-bytes", type=_bytes, default=chunk, help=packed)
    add_report_option(found)
    return found


def _bytes(text: str) -> int:
    """Return a number of bytes that parts of every size add up to."""
    if not text.isdecimal() or int(text) == 0 or int(text) % SIZES[-1]:
        raise argparse.ArgumentTypeError(f"{text!r}: give a multiple of {SIZES[-1]}")
    return int(text)


if __name__ == "__main__":
    # By its module's name: the ranks look the function up where it was defined.
    from benchmarks.switch_sizes import main as run

    sys.exit(run())
