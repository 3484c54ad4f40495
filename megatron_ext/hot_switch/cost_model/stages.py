# SPDX-License-Identifier: Apache-2.0
"""What each pipeline stage of a strategy holds, for choosing before running."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.params import Coordinates, GptShape, Placement

__all__ = ["Stage", "stages_of", "stages_together"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a rank of one pipeline stage holds."""

    elements: int
    """Elements of its parameters, the copy of a tied embedding among them."""

    optimizer_elements: float
    """Elements whose optimizer state it keeps, with the distributed optimizer."""

    layers: int
    """Decoder layers."""

    waiting: int
    """Micro-batches whose activations it keeps at once in a long 1F1B schedule."""

    has_output: bool
    """Whether it makes logits."""


@functools.cache
def stages_of(shape: GptShape, strategy: Strategy) -> tuple[Stage, ...]:
    """Return the pipeline stages of a strategy, the first one first.

    Ranks of a stage hold equally many elements, wherever tensor and expert parallelism divide evenly.

    Args:
        shape: the model.
        strategy: its sizes divide the model's.
    """
    layout = strategy.layout(shape.num_layers)
    placement = Placement(shape, layout)
    found = []
    for pp in range(strategy.pp):
        held = [placed for placed in placement.on(Coordinates(pp=pp)) if placed.tensor.kind == "parameter"]
        found.append(
            Stage(
                elements=sum(placed.slice.numel for placed in held),
                optimizer_elements=sum(
                    placed.slice.numel / (layout.expert_dp if placed.tensor.is_expert else layout.replicas)
                    for placed in held
                ),
                layers=sum(len(layers) for layers in placement.chunk_layers[pp :: strategy.pp]),
                waiting=strategy.pp - pp,
                has_output=pp == strategy.pp - 1,
            )
        )
    return tuple(found)


def stages_together(shape: GptShape, one: Strategy, other: Strategy) -> Iterator[tuple[Stage, Stage]]:
    """Yield the stages of two strategies that some rank has at the same time, pipelines being the slowest dimension.

    Args:
        shape: the model.
        one: of as many ranks as the other.
        other: the other.
    """
    parts = math.lcm(one.pp, other.pp)
    ones, others = stages_of(shape, one), stages_of(shape, other)
    for part in range(parts):
        yield ones[part * one.pp // parts], others[part * other.pp // parts]
