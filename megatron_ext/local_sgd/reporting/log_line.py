# SPDX-License-Identifier: Apache-2.0
"""What local SGD adds to Megatron's log: the workers' mean losses, and figures of the last round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.hooks import TrainingLog
from megatron_ext.local_sgd.reporting.round_report import RoundReport

__all__ = ["average_losses", "fields", "scalars"]


def fields(rounds: int, last: RoundReport | None, workers: int) -> list[tuple[str, str]]:
    """Return what the iteration line gets, as (name, value).

    Args:
        rounds: how many there were.
        last: the last one that this process made, if any.
        workers: how many there are.
    """
    found = [("outer round", str(rounds))]
    if last is not None:
        found.append(("pseudo-grad norm", f"{last.pseudo_gradient_norm:.3f}"))
    left_out = set().union(*last.rejected.values()) if last is not None else set()
    return [*found, ("workers", f"{workers - len(left_out)}/{workers}")]


def scalars(reports: Sequence[RoundReport]) -> dict[str, float]:
    """Return what TensorBoard and wandb get of the rounds since they were last written to, at least one.

    What can be added up is added up; the rest is the last round's.
    """
    report = reports[-1]
    found: dict[str, float] = {
        "local-sgd/round": report.round,
        "local-sgd/pseudo-grad-norm": report.pseudo_gradient_norm,
        "local-sgd/rejected": sum(len(workers) for each in reports for workers in each.rejected.values()),
        "local-sgd/skipped-units": sum(len(each.skipped_units) for each in reports),
        "local-sgd/bytes": sum(each.bytes_sent for each in reports),
        "local-sgd/sync-seconds": math.fsum(each.seconds for each in reports),
        "local-sgd/waiting-seconds": math.fsum(each.waiting_seconds for each in reports),
        "local-sgd/sending-seconds": math.fsum(each.sending_seconds for each in reports),
        "local-sgd/applying-seconds": math.fsum(each.applying_seconds for each in reports),
    }
    for worker, weights in enumerate(zip(*report.weights.values(), strict=True)):
        found[f"local-sgd/weight of worker {worker}"] = math.fsum(weights) / len(weights)
    found |= {f"local-sgd/outer-{option}": value for option, value in report.outer_options.items()}
    if report.cosine is not None:
        found["local-sgd/cosine"] = report.cosine
    return found


@torch.no_grad()
def average_losses(context: TrainingLog, across: Any) -> None:
    """Make the line print the mean over workers of each worker's mean loss since the last line.

    Megatron is about to add this step's loss and to divide by its own count of advanced iterations, so the
    sum is set to what gives the mean after that.

    Args:
        context: of the line; its losses and sums are changed in place.
        across: process group of the ranks that hold the same values, one per worker.
    """
    totals = context.total_losses
    advanced = int(totals.get("advanced iterations", 0)) + int(not context.skipped)
    for name, loss in context.losses.items():
        added = torch.zeros_like(loss) if context.skipped else loss
        sums = torch.stack(
            [
                (totals[name].view(-1)[0] if name in totals else torch.zeros_like(added).view(-1)[0])
                + added.view(-1)[0],
                torch.tensor(float(advanced), device=added.device),
            ]
        ).double()
        mine = torch.stack([sums[0] / sums[1].clamp(min=1), (sums[1] > 0).double()])
        dist.all_reduce(mine, group=across)
        mean = mine[0] / mine[1].clamp(min=1)
        context.scalars[f"local-sgd/{name}"] = float(mean)
        if advanced:
            totals[name] = (mean * advanced - added.view(-1)[0]).float().view(1)
