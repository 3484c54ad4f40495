# SPDX-License-Identifier: Apache-2.0
"""The processes of `spes_round`: a server, the peers that make rounds with it, and what is measured in them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Job",
    "Measured",
    "merge_bytes",
    "model",
    "peer_rounds",
    "process_peak",
    "processor_seconds",
    "start_bare",
    "thread_count",
]

REPOSITORY = Path(__file__).resolve().parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every peer does."""

    shapes: Shapes
    """Of the model."""

    experts: int
    """Of a layer."""

    address: str
    """Of the server."""

    pid: int
    """Of the server's process."""

    codec: str
    """Of what travels; the run is called after it."""

    rounds: int
    """Measured rounds."""

    warmup: int
    """Rounds before those."""

    bare: str = ""
    """Address of the bare server that moves the same bytes by turns; none when empty."""

    counts_bytes: bool = False
    """Whether the first peer's connection leads through a relay that counts."""

    link: float | None = None
    """Bytes per second that every peer's connection passes in each direction, and are counted; no limit when None."""


@dataclass(kw_only=True)
class Measured:
    """What one peer measured, round by round."""

    seconds: list[float]
    """Wall time of a round."""

    bare_seconds: list[float]
    """Wall time in which bare streams moved the same bytes."""

    server_cpu: list[float]
    """Seconds of the server's processors in a round."""

    server_peak: list[int]
    """The server's largest resident memory in a round, bytes."""

    wire_bytes: list[int]
    """Bytes of this peer's connection in a round, both directions; none unless counted."""


def model(parameters: float, layers: int, hidden: int, experts: int) -> Shapes:
    """Return the shapes of a mixture of experts of about that many parameters, 60 % of them in experts."""
    width = max(1, round(0.6 * parameters / (3 * layers * experts * hidden)))
    vocab = max(16, round((0.4 * parameters - layers * 4 * hidden * hidden) / (2 * hidden)))
    found: Shapes = {"embedding.word_embeddings.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}"
        found[f"{prefix}.self_attention.linear_proj.weight"] = (hidden, hidden)
        found[f"{prefix}.self_attention.linear_qkv.weight"] = (3 * hidden, hidden)
        found[f"{prefix}.mlp.router.weight"] = (experts, hidden)
        for expert in range(experts):
            found[f"{prefix}.mlp.experts.{expert}.linear_fc1.weight"] = (2 * width, hidden)
            found[f"{prefix}.mlp.experts.{expert}.linear_fc2.weight"] = (hidden, width)
    found["output_layer.weight"] = (vocab, hidden)
    return found


@contextmanager
def start_bare() -> Iterator[str]:
    """Run a server of bare streams until the end of the block, and return its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bare_stream"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait()


def peer_rounds(job: Job) -> Measured:
    """Run on every peer: make rounds, and by turns with them move the same bytes in bare streams."""
    import torch
    import torch.distributed as dist

    from benchmarks.byte_relay import ByteRelay
    from megatron_ext.spes import Ownership
    from megatron_ext.sync_service.channel.connection import ConnectionConfig
    from megatron_ext.sync_service.peer.client import ClientConfig, SyncClient
    from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ownership = Ownership.contiguous(world, job.experts)
    catalog = Catalog(
        TensorSpec(name=name, shape=shape, unit=name.split(".mlp")[0], owners=ownership.owners_of(name))
        for name, shape in job.shapes.items()
    )
    is_relayed = job.link is not None or (job.counts_bytes and rank == 0)
    relay = ByteRelay(int(job.address.rpartition(":")[2]), rate=job.link) if is_relayed else None
    config = ClientConfig(
        connection=ConnectionConfig(server=relay.address if relay else job.address),
        run=job.codec,
        peer=f"peer-{rank}",
        index=rank,
        codec=job.codec,
    )
    trained = sum(spec.numel for spec in catalog if spec.is_trained_by(rank))
    foreign = sum(spec.numel for spec in catalog if spec.owners != (rank,))
    bare = _bare_turns(job.bare, 4 * trained, 4 * foreign, config.streams) if job.bare else None
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator).mul_(0.02) for name, shape in job.shapes.items()}
    found = Measured(seconds=[], bare_seconds=[], server_cpu=[], server_peak=[], wire_bytes=[])
    with SyncClient(config, catalog) as client:
        values, memory = client.start(values), {name: value.clone() for name, value in values.items()}
        for number in range(job.warmup + job.rounds):
            for spec in catalog:
                if spec.is_trained_by(rank):
                    values[spec.name].mul_(1 + 1e-3 * (rank + 1))
            before = relay.total if relay else 0
            if bare is not None and number % 2:
                found.bare_seconds.append(bare())
            dist.barrier()
            if rank == 0:
                _forget_peak(job.pid)
            cpu = processor_seconds(job.pid)
            dist.barrier()
            began = time.perf_counter()
            values, memory = client.sync(values, out=memory).values, values
            dist.barrier()
            found.seconds.append(time.perf_counter() - began)
            found.server_cpu.append(processor_seconds(job.pid) - cpu)
            found.server_peak.append(process_peak(job.pid))
            if relay:
                found.wire_bytes.append(relay.total - before)
            if bare is not None and not number % 2:
                found.bare_seconds.append(bare())
    for series in vars(found).values():
        del series[: job.warmup]
    return found


def merge_bytes(folder: Path, experts: int, width: int, hidden: int) -> int:
    """Run on one process: return by how many bytes its memory grows at most while the server's code merges a layer."""
    import torch

    from megatron_ext.spes import MergeConfig
    from megatron_ext.sync_service.disk.snapshot_writer import SnapshotWriter
    from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
    from megatron_ext.sync_service.values.failpoints import Failpoints
    from megatron_ext.sync_service.values.merge import Merge

    torch.set_num_threads(1)
    name = "decoder.layers.0.mlp.experts.{}.linear_fc{}.weight"
    catalog = Catalog(
        TensorSpec(name=name.format(expert, part), shape=(2 * width, hidden) if part == 1 else (hidden, width))
        for expert in range(experts)
        for part in (1, 2)
    )
    writer = SnapshotWriter(folder / "merged.safetensors", catalog, [], {})
    for spec in catalog:
        writer.write(spec.name, torch.randn(spec.shape))
    merge = Merge.of_round(MergeConfig(interval=1), catalog, 1)
    assert merge is not None
    torch.ones(8, 8).double() @ torch.ones(8, 8).double()  # what the first product takes once is not merging's
    _forget_peak(os.getpid())
    before = process_peak(os.getpid())
    merge.run(writer, Failpoints())
    grown = process_peak(os.getpid()) - before
    writer.abandon()
    return grown


def process_peak(pid: int) -> int:
    """Return the largest resident memory of a process since `_forget_peak`, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"process {pid} has no peak memory")


def _bare_turns(address: str, up: int, down: int, streams: int) -> Callable[[], float]:
    import torch.distributed as dist

    from benchmarks.bare_stream import BareClient

    client = BareClient(address, streams)

    def turn() -> float:
        dist.barrier()
        began = time.perf_counter()
        client.upload(up)
        # A round as well has everything before it gives anything back.
        dist.barrier()
        client.download(down)
        dist.barrier()
        return time.perf_counter() - began

    return turn


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def processor_seconds(pid: int) -> float:
    """Return the seconds of processors that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def thread_count(pid: int) -> int:
    """Return how many threads a process has."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
