# SPDX-License-Identifier: Apache-2.0
"""Keeps workers at the same place of Megatron's learning-rate schedule.

Megatron moves it on only after steps that were made, and a step that loss scaling skips is one of a worker alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.local_sgd.agreement import held_by, workers_in_words

__all__ = ["catch_up", "follow_all", "may_skip_steps"]


def may_skip_steps(args: Any) -> bool:
    """Return whether loss scaling may skip a step of one worker, given Megatron's arguments."""
    return bool(args.fp16 or args.loss_scale)


def catch_up(scheduler: Any, across: Any, device: torch.device) -> str | None:
    """Move the schedule of workers that are behind to the place of the furthest one; all ranks of `across` call it.

    Args:
        scheduler: Megatron's `OptimizerParamScheduler`.
        across: process group with one rank of every worker, in worker order.
        device: of what is exchanged.

    Returns:
        The message about it; None where all workers are at one place.
    """
    own = torch.tensor([scheduler.num_steps], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(across))]
    dist.all_gather(everyone, own, group=across)
    places = torch.cat(everyone).tolist()
    furthest = max(places)
    if min(places) == furthest:
        return None
    if scheduler.num_steps < furthest:
        scheduler.step(increment=furthest - scheduler.num_steps)
    return (
        f"local SGD: the learning-rate schedule was at sample {held_by(places, workers_in_words)}, because steps were "
        f"skipped; it is at {furthest} on all workers now"
    )


def follow_all(scheduler: Any, before: int, across: Any, device: torch.device) -> None:
    """Move the schedule on by the steps of all workers; all ranks of `across` call it.

    A step moves a worker's schedule by a global batch, of which it has trained on its part.

    Args:
        scheduler: Megatron's `OptimizerParamScheduler`.
        before: its sample at the last meeting, the same on all workers.
        across: process group with one rank of every worker.
        device: of what is exchanged.
    """
    moved = torch.tensor([scheduler.num_steps - before], dtype=torch.int64, device=device)
    dist.all_reduce(moved, group=across)
    scheduler.num_steps = before + int(moved) // dist.get_world_size(across)
    scheduler.step(increment=0)
