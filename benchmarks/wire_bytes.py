# SPDX-License-Identifier: Apache-2.0
"""What compressed rounds really put on the wire: a part of outer_sync.py."""

from __future__ import annotations

from benchmarks.common import Case, print_table
from tests.support.distributed import run_ranks

__all__ = ["measure"]

# The case's name, the codec, and the goal: bytes of a round against those of a ring all-reduce in fp32.
CODECS = (("bf16", "bf16", 0.53), ("int8", "int8", 0.28), ("4bit", "int4", 0.15))
SHAPES = [(4096, 512), (512,), (1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048), (512,)]


def measure(workers: int) -> list[Case]:
    """Measure a round with every codec, print a table, and return the cases."""
    cases, rows = [], []
    for name, codec, goal in CODECS:
        by_rank = run_ranks(bytes_of_a_round, workers, codec)
        sent, numel = max(sent for sent, _ in by_rank), by_rank[0][1]
        ring = 2 * (workers - 1) * 4 * numel / workers
        cases.append(Case(case=f"wire_bytes_{name}", value=sent / ring, unit="ratio", goal=goal, direction="lower"))
        rows.append((codec, str(workers), f"{sent:,}", f"{ring:,.0f}", f"{sent / ring:.4f}"))
    print_table(("codec", "workers", "bytes a rank sends", "fp32 ring all-reduce", "ratio"), rows)
    return cases


def bytes_of_a_round(codec: str) -> tuple[int, int]:
    """Run on one rank: return what crossed from here in the second round, and the number of values."""
    import torch
    import torch.distributed as dist

    from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, OuterOptimizerConfig
    from megatron_ext.local_sgd.engine import LocalSGD, SyncedTensor
    from megatron_ext.patching import PatchRegistry
    from megatron_ext.transport.traffic import TrafficMeter

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([member]) for member in range(world)][rank]
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in SHAPES]
    engine = LocalSGD(
        [SyncedTensor(tensor=value, name=str(index), unit="all") for index, value in enumerate(values)],
        units=["all"],
        config=LocalSGDConfig(use_local_sgd=True, local_sgd_workers=world, codec=codec),
        outer=OuterOptimizerConfig(),
        gta=GTAConfig(),
        across=dist.group.WORLD,
        inside=alone,
    )
    engine.take_anchor()
    torch.manual_seed(rank)
    meter = TrafficMeter(worker_of=range(world))
    PatchRegistry().apply(meter.patches())
    for _ in range(2):
        for value in values:
            value += 0.01 * torch.randn(value.shape)
        meter.reset()
        engine.sync()
    return meter.crossing_bytes, sum(value.numel() for value in values)
