# SPDX-License-Identifier: Apache-2.0
"""The processes of `spes_round`: a server, the peers that make rounds with it, and what is measured in them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bare_turns import BareServer, Bytes, bare_turns
from benchmarks.process_use import forget_peak, process_peak, processor_seconds, thread_seconds

__all__ = ["Job", "Measured", "merge_bytes", "model", "peer_rounds"]

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

    bare: Mapping[str, BareServer] = field(default_factory=dict)
    """What moves the same bytes by turns, of GRPC and SOCKETS."""

    counts_bytes: bool = False
    """Whether the first peer's connection leads through a relay that counts."""

    link: float | None = None
    """Bytes per second that every peer's connection passes in each direction, and are counted; no limit when None."""


@dataclass(kw_only=True)
class Measured:
    """What one peer measured, round by round."""

    seconds: list[float] = field(default_factory=list)
    """Wall time of a round."""

    cpu: list[float] = field(default_factory=list)
    """Seconds of this peer's processors in a round."""

    server_cpu: list[float] = field(default_factory=list)
    """Seconds of the server's processors in a round."""

    server_thread_cpu: list[float] = field(default_factory=list)
    """Those of its busiest thread: the event loop of its calls."""

    server_peak: list[int] = field(default_factory=list)
    """The server's largest resident memory in a round, bytes."""

    wire_bytes: list[int] = field(default_factory=list)
    """Bytes of this peer's connection in a round, both directions; none unless counted."""

    bare: dict[str, Bytes] = field(default_factory=dict)
    """What else moved the same bytes."""


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
    found = Measured(bare={kind: Bytes() for kind in job.bare})
    turn = bare_turns(job.bare, 4 * trained, 4 * foreign, config.streams, found.bare)
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator).mul_(0.02) for name, shape in job.shapes.items()}
    with SyncClient(config, catalog) as client:
        values, memory = client.start(values), {name: value.clone() for name, value in values.items()}
        for number in range(job.warmup + job.rounds):
            for spec in catalog:
                if spec.is_trained_by(rank):
                    values[spec.name].mul_(1 + 1e-3 * (rank + 1))
            before = relay.total if relay else 0
            if number % 2:
                turn()
            dist.barrier()
            if rank == 0:
                forget_peak(job.pid)
            cpu, threads, own = processor_seconds(job.pid), thread_seconds(job.pid), time.process_time()
            dist.barrier()
            began = time.perf_counter()
            values, memory = client.sync(values, out=memory).values, values
            dist.barrier()
            found.seconds.append(time.perf_counter() - began)
            found.cpu.append(time.process_time() - own)
            found.server_cpu.append(processor_seconds(job.pid) - cpu)
            after = thread_seconds(job.pid)
            found.server_thread_cpu.append(max(after[thread] - threads.get(thread, 0.0) for thread in after))
            found.server_peak.append(process_peak(job.pid))
            if relay:
                found.wire_bytes.append(relay.total - before)
            if not number % 2:
                turn()
    for measured in (found, *found.bare.values()):
        for series in vars(measured).values():
            if isinstance(series, list):
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
    forget_peak(os.getpid())
    before = process_peak(os.getpid())
    merge.run(writer, Failpoints())
    grown = process_peak(os.getpid()) - before
    writer.abandon()
    return grown
