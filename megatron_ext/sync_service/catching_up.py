# SPDX-License-Identifier: Apache-2.0
"""Going on from a checkpoint that is older than what the peer has contributed since, or from none.

A process that died had made steps after its last checkpoint, which count in rounds. The one that takes its place begins
with the values of such a round, so its iteration, its samples and its schedules go on after these steps, too: else it
would make them twice, on the same samples, and lag behind the others.
"""

from __future__ import annotations

from megatron_ext.hooks import ModelContext
from megatron_ext.seams.arguments import say

__all__ = ["catch_up"]


def catch_up(context: ModelContext, steps: int) -> None:
    """Count steps as made; all ranks call it, after loading and before the data are built.

    Args:
        context: of the model that was loaded, or built.
        steps: completed by an earlier process.
    """
    args = context.args
    samples = steps * args.global_batch_size
    args.iteration += steps
    args.consumed_train_samples += samples
    context.scheduler.step(increment=samples)
    say(
        f"sync service: goes on at iteration {args.iteration}, because {steps} steps that this peer had made after "
        f"iteration {args.iteration - steps} count in rounds already"
    )
