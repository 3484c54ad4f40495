# SPDX-License-Identifier: Apache-2.0
"""Whether a step's samples can be dealt out, which Megatron says without the names of the flags."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from megatron_ext.options import asks_to_switch

__all__ = ["batch_size_problem", "schedule_problem", "sizes_problem"]

_REPLICAS = "(world size / TP*PP*CP)"


def batch_size_problem(args: Any) -> str | None:
    """Return why the global batch size does not go with the other sizes, and the way out.

    Strategies that are switched have sizes of their own, which hot switching checks.

    Args:
        args: Megatron's arguments as parsed.
    """
    replicas = _replicas(args)
    if replicas is None:
        return None
    of_steps = (args.global_batch_size, args.micro_batch_size)
    if not args.decrease_batch_size_if_needed and (problem := _problem("", *of_steps, replicas)) is not None:
        return problem
    # Releases before 0.19 evaluate with the sizes of a step.
    evaluated = (getattr(args, f"eval_{name}_batch_size", None) for name in ("global", "micro"))
    batch, micro = (own or other for own, other in zip(evaluated, of_steps, strict=True))
    if not hasattr(args, "eval_global_batch_size"):
        return None
    source = "" if args.eval_global_batch_size else " (that of --global-batch-size, unless it is given)"
    return _problem("eval-", batch, micro, replicas, source)


def schedule_problem(args: Any) -> str | None:
    """Return why Megatron cannot read the schedule of batch sizes, or would stop in the middle of it.

    It reads it after all arguments are taken. Strategies that are switched have sizes of their own, by which hot
    switching asks `sizes_problem`.

    Args:
        args: Megatron's arguments as parsed.
    """
    try:
        sizes = _scheduled_sizes(args)
    except (AssertionError, ValueError) as error:
        return (
            f"--step-batch-size-schedule {args.step_batch_size_schedule!r}: {error}; give pairs of a threshold in "
            f"tokens, the first 0 and each a sequence ({args.seq_length}) or more above the one before, and a batch "
            "size, such as '0:4 64K:8'"
        )
    replicas = _replicas(args) if sizes else None
    if replicas is None or (args.micro_batch_size or 0) < 1:
        return None
    factors = f"--micro-batch-size {args.micro_batch_size} times the data-parallel size {replicas} {_REPLICAS}"
    return sizes_problem(args, args.micro_batch_size * replicas, factors)


def sizes_problem(args: Any, whole: int, factors: str) -> str | None:
    """Return at which size of its schedule Megatron would stop, and the way out.

    Args:
        args: Megatron's arguments as parsed, with a schedule that can be read, or none.
        whole: samples of which a batch must be a multiple.
        factors: where that comes from, for the message.
    """
    sizes = _scheduled_sizes(args)
    title = f"--step-batch-size-schedule {getattr(args, 'step_batch_size_schedule', None)!r}"
    for size in sizes:
        if size % whole:
            return f"{title}: the batch size {size} is not a multiple of {factors}; give {_multiples(size, whole)}"
    for size, following in pairwise(sizes):
        if following < size:
            return (
                f"{title}: the batch size falls from {size} to {following}, and Megatron stops where the number of "
                "micro-batches does; give sizes that grow, and start the run again with --load and a smaller "
                "--global-batch-size where it is to fall"
            )
    return None


def _replicas(args: Any) -> int | None:
    """Return the data-parallel size; None with strategies, and where Megatron says what is wrong with the layout."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    return None if args.world_size % model or asks_to_switch(args) else int(args.world_size // model)


def _scheduled_sizes(args: Any) -> list[int]:
    """Return the batch sizes of the schedule in their order; none without one.

    Raises:
        AssertionError, ValueError: it cannot be read.
    """
    from megatron.core import num_microbatches_calculator  # this one is imported before Megatron is

    # Releases before 0.19 have no schedules.
    calculator = getattr(num_microbatches_calculator, "StepBatchsizeNumMicroBatchesCalculator", None)
    schedule = getattr(args, "step_batch_size_schedule", None)
    if calculator is None or schedule is None or args.seq_length is None:
        return []
    return [int(size) for _, size in calculator(1, 1, False, -1, schedule, args.seq_length).schedule]


def _problem(which: str, batch: int | None, micro: int | None, replicas: int, source: str = "") -> str | None:
    """Return why one batch cannot be dealt out; sizes that are not given, or wrong by themselves, Megatron judges."""
    if not batch or batch < 0 or not micro or micro < 0 or batch % (micro * replicas) == 0:
        return None
    return (
        f"--{which}global-batch-size is {batch}{source}, which is not a multiple of --{which}micro-batch-size {micro} "
        f"times the data-parallel size {replicas} {_REPLICAS}; give {_multiples(batch, micro * replicas)}"
    )


def _multiples(size: int, whole: int) -> str:
    """Return the multiples beside a size, without 0."""
    below = max(size, 0) // whole * whole
    return f"{f'{below} or ' if below else ''}{below + whole}"
