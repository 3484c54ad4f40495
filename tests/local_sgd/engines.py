# SPDX-License-Identifier: Apache-2.0
"""Engines on plain tensors over gloo, without Megatron: every rank is a worker."""

import torch
import torch.distributed as dist

from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, OuterOptimizerConfig, StreamingConfig


def start_groups():
    """Start gloo when needed; return the group of all workers and the group of this rank alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return dist.group.WORLD, alone[dist.get_rank()]


def engine_of(
    values,
    *,
    interval=1,
    units=None,
    names=None,
    groups=None,
    penalty=None,
    gta=None,
    streaming=None,
    observe=False,
    **outer,
):
    """Return an engine whose workers are the ranks.

    Args:
        values: fp32 tensors, updated in place.
        interval: H.
        units: the unit of every value; by default all belong to one.
        names: of the values; by default after their units.
        groups: what `start_groups` returned, where it was called already.
        penalty: further fields of `LocalSGDConfig`.
        gta: fields of `GTAConfig`.
        streaming: fields of `StreamingConfig`.
        observe: whether rounds are measured for a log.
        outer: fields of `OuterOptimizerConfig`.
    """
    from megatron_ext.local_sgd.engine import LocalSGD, SyncedTensor

    across, inside = groups or start_groups()
    units = units or ["layer.0"] * len(values)
    names = names or [f"{unit}.tensor.{index}" for index, unit in enumerate(units)]
    return LocalSGD(
        [
            SyncedTensor(tensor=value, name=name, unit=unit)
            for value, name, unit in zip(values, names, units, strict=True)
        ],
        units=list(dict.fromkeys(units)),
        config=LocalSGDConfig(
            use_local_sgd=True,
            local_sgd_workers=dist.get_world_size(across),
            local_sgd_sync_interval=interval,
            **(penalty or {}),
        ),
        outer=OuterOptimizerConfig(**outer),
        gta=GTAConfig(**(gta or {})),
        across=across,
        inside=inside,
        streaming=StreamingConfig(**(streaming or {})),
        observe=observe,
    )


def pairs():
    """Start gloo; return (across, inside) of 2 workers of 2 ranks each."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    return across, inside


def replica_beside_shards(**options):
    """Return a tensor that both ranks of each of two workers hold, after rounds in which they hold others besides.

    Args:
        options: of `engine_of`.
    """
    groups = pairs()
    rank = dist.get_rank()
    replica, shard = torch.zeros(101), torch.zeros(60)
    engine = engine_of([replica, shard], groups=groups, **options)
    engine.take_anchor()
    by_worker = torch.Generator().manual_seed(rank // 2)
    by_rank = torch.Generator().manual_seed(10 + rank)
    for _ in range(2):
        replica += torch.randn(101, generator=by_worker)
        shard += (1 + 9 * (rank % 2)) * torch.randn(60, generator=by_rank)
        engine.sync()
    return replica.tolist()


def moved(values, step):
    """Change the values as an interval of inner steps might: every worker by another amount."""
    with torch.no_grad():
        for value in values:
            value += step * (dist.get_rank() + 1)
