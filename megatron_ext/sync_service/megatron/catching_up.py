# SPDX-License-Identifier: Apache-2.0
"""Beginning an interval with the values of a round that an earlier process of this peer may have contributed to.

The steps that it had made by its last contribution are not made again, whatever the checkpoint is or is not, and those
of the checkpoint that no round has taken are: else they would be made twice, on the same samples, or not at all, and
intervals would no longer end where those of the others do.
"""

from __future__ import annotations

from megatron_ext.hooks import ModelBuilt
from megatron_ext.seams.arguments import say
from megatron_ext.sync_service.megatron.checkpoint import Begun
from megatron_ext.sync_service.megatron.step_size import samples_of_step
from megatron_ext.sync_service.peer.interval import Interval
from megatron_ext.sync_service.protocol.report import Progress
from megatron_ext.sync_service.protocol.resuming import Claim

__all__ = ["claim_of", "progress_after_step", "resume_after"]


def progress_after_step(context: ModelBuilt) -> Progress:
    """Return how far training is after a step that Megatron has not counted yet, except for its schedules."""
    args, batch = context.args, samples_of_step(context.args)
    return Progress(
        iteration=args.curr_iteration + 1,
        samples=args.consumed_train_samples + batch,
        schedule=context.scheduler.num_steps,
        batch=batch,
    )


def claim_of(context: ModelBuilt, begun: Begun | None, interval: Interval, *, whole: bool) -> Claim:
    """Return what a job begins with.

    Args:
        context: of the model that was loaded, or built.
        begun: where the interval of its checkpoint began; None where that has none of this run.
        interval: what it makes.
        whole: whether all of the checkpoint was loaded, and not its weights alone.
    """
    batch, steps = samples_of_step(context.args), interval.wanted_steps
    now = _progress_before(context, 0, batch)
    if begun is None:
        return Claim(repeats=steps is not None, steps=steps, begin=now, now=now)
    return Claim(
        round=begun.number,
        digest=begun.digest,
        whole=whole,
        repeats=steps is not None and begun.batch == batch,
        steps=steps,
        begin=_progress_before(context, begun.steps, begun.batch),
        now=now,
    )


def _progress_before(context: ModelBuilt, steps: int, batch: int) -> Progress:
    """Return how far training was a number of steps of such a batch ago."""
    args, samples = context.args, steps * batch
    return Progress(
        iteration=args.iteration - steps,
        samples=args.consumed_train_samples - samples,
        # Weights alone begin with fresh schedules.
        schedule=max(0, context.scheduler.num_steps - samples),
        batch=batch,
    )


def resume_after(context: ModelBuilt, last: Progress) -> None:
    """Resume where the server has said; all ranks call it before the data are built.

    Args:
        context: of the model that was loaded, or built.
        last: how far training is there, in this job's batches.
    """
    args, scheduler, iteration = context.args, context.scheduler, last.iteration
    if (iteration, last.samples, last.schedule) == (args.iteration, args.consumed_train_samples, scheduler.num_steps):
        return
    why = f"what this peer had made after it, up to iteration {args.iteration}, counts in no round"
    if iteration > args.iteration:
        steps = f"{iteration - args.iteration} steps that this peer had made after iteration {args.iteration}"
        why = f"{steps} were contributed to rounds already"
    elif iteration == args.iteration:
        why = f"this peer's last contribution ended there, with {last.samples} samples of its part"
    say(f"sync service: resumes at iteration {iteration}, because {why}")
    args.iteration, args.consumed_train_samples = iteration, last.samples
    scheduler.step(increment=last.schedule - scheduler.num_steps)
