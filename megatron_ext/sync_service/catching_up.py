# SPDX-License-Identifier: Apache-2.0
"""Beginning an interval with the values of a round that an earlier process of this peer may have contributed to.

The steps that it had made by its last contribution are not made again, whatever the checkpoint is or is not, and those
of the checkpoint that no round has taken are: else they would be made twice, on the same samples, or not at all, and
intervals would no longer end where those of the others do.
"""

from __future__ import annotations

from megatron_ext.hooks import ModelContext
from megatron_ext.seams.arguments import say
from megatron_ext.sync_service.report import Progress

__all__ = ["go_on_after", "progress_after_step", "progress_before"]


def progress_after_step(context: ModelContext) -> Progress:
    """Return how far training is after a step that Megatron has not counted yet, but for its schedules."""
    args = context.args
    samples = args.consumed_train_samples + args.global_batch_size
    return Progress(iteration=args.curr_iteration + 1, samples=samples, schedule=context.scheduler.num_steps)


def progress_before(context: ModelContext, steps: int) -> Progress:
    """Return how far training was so many steps ago, where no round knows of this peer."""
    args, samples = context.args, steps * context.args.global_batch_size
    return Progress(
        iteration=args.iteration - steps,
        samples=args.consumed_train_samples - samples,
        schedule=context.scheduler.num_steps - samples,
    )


def go_on_after(context: ModelContext, last: Progress) -> None:
    """Go on where the peer's last contribution ended; all ranks call it before the data are built.

    Args:
        context: of the model that was loaded, or built.
        last: how far an earlier process was when it made its last contribution that a round has judged.
    """
    args = context.args
    if last.iteration == args.iteration:
        return
    why = f"what this peer had made after it, up to iteration {args.iteration}, counts in no round"
    if last.iteration > args.iteration:
        steps = f"{last.iteration - args.iteration} steps that this peer had made after iteration {args.iteration}"
        why = f"{steps} were contributed to rounds already"
    say(f"sync service: goes on at iteration {last.iteration}, because {why}")
    args.iteration, args.consumed_train_samples = last.iteration, last.samples
    context.scheduler.step(increment=last.schedule - context.scheduler.num_steps)
