# SPDX-License-Identifier: Apache-2.0
"""Outer rounds of a model's parameters on every rank, by turns with bare all-reduces and copies of as many bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.common import GUARDS

if TYPE_CHECKING:
    import torch

__all__ = [
    "PENALTY",
    "PLAIN",
    "Measured",
    "Setting",
    "Timing",
    "numel",
    "rank_timings",
    "require_equal",
    "shapes",
    "units_of",
]

PLAIN, PENALTY = "diloco", "penalty"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is synchronised, and how often it is measured."""

    shapes: list[tuple[int, ...]]
    """Of the tensors that are synchronised."""

    pairs: int
    """Measured pairs."""

    warmup: int
    """Pairs before those, not counted."""

    method: str = PLAIN
    """Of the rounds."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank measured, without the warm-up."""

    reduces: list[Timing]
    """The all-reduces, pair by pair."""

    rounds: list[Timing]
    """The outer rounds, pair by pair."""

    copies: list[Timing]
    """The copies of the parameters, pair by pair."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured operation on one rank."""

    wall: float
    """Seconds from the barrier to its end."""

    cpu: float
    """Seconds of processor time of all threads."""


def shapes(layers: int, hidden: int, vocab: int) -> list[tuple[int, ...]]:
    """Return the parameter shapes of a GPT in Megatron's order: tied embedding, positions, layers, final norm."""
    layer: list[tuple[int, ...]] = [
        (hidden,),
        (hidden,),
        (hidden, hidden),
        (hidden,),
        (3 * hidden, hidden),
        (3 * hidden,),
        (hidden,),
        (hidden,),
        (4 * hidden, hidden),
        (4 * hidden,),
        (hidden, 4 * hidden),
        (hidden,),
    ]
    return [(vocab, hidden), (1024, hidden), *layer * layers, (hidden,), (hidden,)]


def units_of(tensors: list[tuple[int, ...]]) -> list[str]:
    """Return the unit of every tensor of `shapes`."""
    layer = 12
    inner = [f"layer.{index // layer}" for index in range(len(tensors) - 4)]
    return ["embedding", "embedding", *inner, "final_norm", "final_norm"]


def numel(tensors: list[tuple[int, ...]]) -> int:
    """Return the number of elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in tensors)


def rank_timings(setting: Setting) -> Measured:
    """Run on one rank: measure all pairs."""
    import torch
    import torch.distributed as dist

    from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, OuterOptimizerConfig
    from megatron_ext.local_sgd.engine import LocalSGD, SyncedTensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([member]) for member in range(world)][rank]
    torch.manual_seed(0)
    values = [torch.randn(shape).mul_(0.02) for shape in setting.shapes]
    units = units_of(setting.shapes)
    engine = LocalSGD(
        [
            SyncedTensor(tensor=value, name=str(index), unit=unit)
            for index, (value, unit) in enumerate(zip(values, units, strict=True))
        ],
        units=list(dict.fromkeys(units)),
        config=LocalSGDConfig(
            use_local_sgd=True, local_sgd_workers=world, **(GUARDS if setting.method == PENALTY else {})
        ),
        outer=OuterOptimizerConfig(),
        gta=GTAConfig(),
        across=dist.group.WORLD,
        inside=alone,
    )
    engine.take_anchor()
    flat, copied = torch.empty(numel(setting.shapes)), torch.empty(numel(setting.shapes))

    def all_reduce() -> Timing:
        flat.fill_(1.0)
        return _timed(lambda: dist.all_reduce(flat))

    def round_() -> Timing:
        # What an interval of inner steps did: every worker moved by another, small amount.
        for value in values:
            value.mul_(1 + 1e-3 * (rank + 1))
        return _timed(engine.sync)

    reduces, rounds, copies = [], [], []
    for pair in range(setting.warmup + setting.pairs):
        # ABBA: what drifts over the pairs touches both sides alike.
        if pair % 2 == 0:
            reduced, synced = all_reduce(), round_()
        else:
            synced, reduced = round_(), all_reduce()
        reduces.append(reduced)
        rounds.append(synced)
        copies.append(_timed(lambda: copied.copy_(flat)))
    require_equal(values)
    first = setting.warmup
    return Measured(reduces=reduces[first:], rounds=rounds[first:], copies=copies[first:])


def _timed(operation: Callable[[], object]) -> Timing:
    import torch.distributed as dist

    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    operation()
    return Timing(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)


def require_equal(values: list[torch.Tensor]) -> None:
    """Refuse a measurement after which the workers differ: it measured something else than a round."""
    import torch.distributed as dist

    from megatron_ext.local_sgd.equal_weights import equal_across

    if not equal_across(values, dist.group.WORLD):
        raise RuntimeError("the workers' values differ after a round")
