# SPDX-License-Identifier: Apache-2.0
"""Going on from a checkpoint that is older than what the peer has contributed since, or from none.

A process that died had made steps after its last checkpoint, which count in rounds. The one that takes its place begins
with the values of such a round, so its iteration, its samples and its schedules go on after these steps, too: else it
would make them twice, on the same samples, and lag behind the others.
"""

from __future__ import annotations

from megatron_ext.hooks import ModelContext
from megatron_ext.seams.arguments import say
from megatron_ext.sync_service.report import Progress

__all__ = ["catch_up", "progress_after"]


def progress_after(context: ModelContext, iteration: int) -> Progress:
    """Return how far training is after an iteration whose samples Megatron has not counted yet."""
    args = context.args
    samples = args.consumed_train_samples + args.global_batch_size
    return Progress(iteration=iteration, samples=samples, schedule=context.scheduler.num_steps)


def catch_up(context: ModelContext, counted: Progress | None) -> bool:
    """Go on after the last step that counts, if training is not as far; all ranks call it before the data are built.

    Args:
        context: of the model that was loaded, or built.
        counted: how far an earlier process was at the end of its last interval that counts.

    Returns:
        Whether it was farther.
    """
    args = context.args
    if counted is None or counted.iteration <= args.iteration:
        return False
    say(
        f"sync service: goes on at iteration {counted.iteration}, because {counted.iteration - args.iteration} steps "
        f"that this peer had made after iteration {args.iteration} count in rounds already"
    )
    args.iteration, args.consumed_train_samples = counted.iteration, counted.samples
    context.scheduler.step(increment=counted.schedule - context.scheduler.num_steps)
    return True
