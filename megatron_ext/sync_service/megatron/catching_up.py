# SPDX-License-Identifier: Apache-2.0
"""Beginning an interval with the values of a round that an earlier process of this peer may have contributed to.

The steps that it had made by its last contribution are not made again, whatever the checkpoint is or is not, and those
of the checkpoint that no round has taken are: else they would be made twice, on the same samples, or not at all, and
intervals would no longer end where those of the others do.
"""

from __future__ import annotations

from megatron_ext.errors import UserError
from megatron_ext.hooks import ModelContext
from megatron_ext.seams.arguments import say
from megatron_ext.sync_service.protocol.report import Progress

__all__ = ["go_on_after", "progress_after_step", "progress_before"]


def progress_after_step(context: ModelContext) -> Progress:
    """Return how far training is after a step that Megatron has not counted yet, but for its schedules."""
    args = context.args
    return Progress(
        iteration=args.curr_iteration + 1,
        samples=args.consumed_train_samples + args.global_batch_size,
        schedule=context.scheduler.num_steps,
        batch=args.global_batch_size,
    )


def progress_before(context: ModelContext, steps: int, batch: int) -> Progress:
    """Return how far training was so many steps of such a batch ago, where no round knows of this peer."""
    args, samples = context.args, steps * batch
    return Progress(
        iteration=args.iteration - steps,
        samples=args.consumed_train_samples - samples,
        # Weights alone begin with fresh schedules.
        schedule=max(0, context.scheduler.num_steps - samples),
        batch=batch,
    )


def go_on_after(context: ModelContext, last: Progress) -> None:
    """Go on where the peer's last contribution ended; all ranks call it before the data are built.

    Args:
        context: of the model that was loaded, or built.
        last: how far an earlier process was when it made its last contribution that a round has judged.

    Raises:
        UserError: that is in the middle of one of this job's batches.
    """
    args, scheduler = context.args, context.scheduler
    iteration = _in_batches(last, args.global_batch_size)
    if (iteration, last.samples, last.schedule) == (args.iteration, args.consumed_train_samples, scheduler.num_steps):
        return
    why = f"what this peer had made after it, up to iteration {args.iteration}, counts in no round"
    if iteration > args.iteration:
        steps = f"{iteration - args.iteration} steps that this peer had made after iteration {args.iteration}"
        why = f"{steps} were contributed to rounds already"
    elif iteration == args.iteration:
        why = f"this peer's last contribution ended there, with {last.samples} samples of its part"
    say(f"sync service: goes on at iteration {iteration}, because {why}")
    args.iteration, args.consumed_train_samples = iteration, last.samples
    scheduler.step(increment=last.schedule - scheduler.num_steps)


def _in_batches(last: Progress, batch: int) -> int:
    """Return the iteration up to which as much of the run is trained, in global batches of this size."""
    iteration, rest = divmod(last.iteration * (last.batch or batch), batch)
    if rest:
        raise UserError(
            f"--global-batch-size {batch}: this peer's part of the samples is trained up to iteration {last.iteration} "
            f"of {last.batch} samples each, which is in the middle of a batch of {batch}; give {last.batch}, or a size "
            f"that divides {last.iteration * last.batch}"
        )
    return iteration
