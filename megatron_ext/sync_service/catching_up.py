# SPDX-License-Identifier: Apache-2.0
"""Going on from a checkpoint that is older than what the peer has contributed since.

A process that died had made steps after its last checkpoint, which count in rounds. The one that takes its place begins
with the values of such a round, so its iteration, its samples and its schedules go on after these steps, too: else it
would make them twice, on the same samples, and lag behind the others.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.hooks import ModelContext
from megatron_ext.seams.arguments import say

__all__ = ["catch_up", "steps_since"]


def steps_since(saved: dict[str, Any], counted: int) -> int:
    """Return how far the peer was after the last step that counts, in steps from its checkpoint on.

    Args:
        saved: the peer's state in the checkpoint.
        counted: steps of the peer that count in rounds by now.
    """
    # The first contribution after the checkpoint began before it.
    return max(0, counted - int(saved["counted_steps"]) - int(saved["steps"]))


def catch_up(context: ModelContext, steps: int) -> None:
    """Count steps as made; all ranks call it, after loading and before the data are built.

    Args:
        context: of the model that was loaded.
        steps: completed by an earlier process.
    """
    args = context.args
    samples = steps * args.global_batch_size
    args.iteration += steps
    args.consumed_train_samples += samples
    context.scheduler.step(increment=samples)
    say(
        f"sync service: goes on at iteration {args.iteration}, because {steps} steps that this peer had made after its "
        "checkpoint count in rounds already"
    )
